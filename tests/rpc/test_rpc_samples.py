"""Samples, keys, states and metadata through a real server, with both clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_server import AnyClient
from rpc_samples import put_train

import tq_service as tq

ONE: dict[str, Any] = {"partition_id": "train", "data_fields": ["score"]}


def test_missing_skip_leaves_out_what_is_not_there(client: AnyClient) -> None:
    meta = put_train(client)
    client.put(meta.select_samples([1, 3]), {"reward": torch.tensor([1.0, 2.0])})
    by_key = client.get_data("train", keys=["k3", "nobody", "k0", "k1"], data_fields=["reward"], missing="skip")
    assert by_key["reward"].tolist() == [2, 1]
    by_index = client.get_data("train", global_indexes=[99, 1, 2], missing="skip", data_fields=["reward"])
    assert by_index["reward"].tolist() == [1]
    by_meta = client.get_data(meta, data_fields=["reward"], missing="skip")
    assert by_meta["reward"].tolist() == [1, 2]
    none = client.get_data("train", keys=["nobody"], data_fields=["reward", "input_ids"], missing="skip")
    assert none["reward"].shape == (0,)
    assert none.batch_size == (0,)


def test_lookup_gives_samples_in_the_order_asked_and_the_missing_keys(client: AnyClient) -> None:
    put_train(client)
    found, missing = client.lookup_samples("train", ["k3", "x", "k0", "y"])
    assert found.global_indexes == [3, 0]
    assert found.keys == ["k3", "k0"]
    assert found.groups == ["g1", "g0"]
    assert [one["total_lengths"] for one in found.custom_meta] == [2, 5]
    assert missing == ["x", "y"]
    assert client.get_data(found)["score"].tolist() == [[9, 10, 11], [0, 1, 2]]


def test_key_modes(client: AnyClient) -> None:
    put_train(client)
    client.put("train", {"score": torch.ones(2, 3)}, keys=["k1", "new"], key_mode="upsert")
    found, _ = client.lookup_samples("train", ["k1", "new"])
    assert found.global_indexes == [1, 4]
    assert client.get_data(found, data_fields=["score"])["score"].tolist() == [[1, 1, 1]] * 2
    made = client.put("train", {"score": torch.zeros(1, 3)}, keys=["fresh"], key_mode="new")
    assert made.global_indexes == [5]
    known = client.put("train", {"score": torch.full((1, 3), 7.0)}, keys=["fresh"], key_mode="existing")
    assert known.global_indexes == [5]
    assert client.get_data(known)["score"].tolist() == [[7, 7, 7]]


def test_a_cleared_key_may_be_used_again_and_its_index_never(client: AnyClient) -> None:
    put_train(client)
    assert client.clear_samples("train", keys=["k1", "nobody"]) == 1
    assert client.clear_samples("train", keys=["k1"]) == 0
    assert client.lookup_samples("train", ["k1"])[1] == ["k1"]
    again = client.put("train", {"score": torch.zeros(1, 3)}, keys=["k1"], key_mode="new")
    assert again.global_indexes == [4]
    summary = client.describe_partition("train").summary
    assert (summary.inserted_count, summary.present_count) == (5, 4)


def test_insert_then_columns(client: AnyClient) -> None:
    meta = client.insert("train", 3, keys=["a", "b", "c"], state="held", custom_meta=[{"version": 1}] * 3)
    assert client.get_meta(**ONE, task_name="t", batch_size=1, max_wait=0).status == "not_yet"
    client.put(meta, {"score": torch.arange(3.0)})
    assert client.get_meta(**ONE, task_name="t", batch_size=1, max_wait=0).status == "not_yet"
    client.put(meta.select_samples([0, 2]), state="live", custom_meta=[{"tag": "x"}, {"tag": "y"}])
    got = client.get_meta(**ONE, task_name="t", batch_size=2)
    assert got.keys == ["a", "c"]
    assert got.custom_meta == [{"version": 1, "tag": "x"}, {"version": 1, "tag": "y"}]
    assert client.get_data(got)["score"].tolist() == [0, 2]


def test_states(client: AnyClient) -> None:
    meta = put_train(client)
    client.put(meta.select_samples([0]), state="held")
    client.put(meta.select_samples([1, 2]), state="failed")
    described = client.describe_partition("train")
    assert (described.live_count, described.held_count, described.failed_count) == (1, 1, 2)
    assert client.get_data(meta.select_samples([0]))["score"].tolist() == [[0, 1, 2]]  # held: addressable
    with pytest.raises(tq.errors.CellNotFoundError):
        client.get_data(meta.select_samples([1]))
    client.seal_partition("train")
    assert client.get_meta(**ONE, task_name="t", batch_size=9, max_wait=0).status == "not_yet"
    client.put(meta.select_samples([0]), state="live")
    assert client.get_meta(**ONE, task_name="t", batch_size=9, max_wait=0).global_indexes == [0, 3]
    end = client.get_meta(**ONE, task_name="t", batch_size=9)
    assert (end.status, end.skipped_count) == ("end", 2)
    assert end.end.skipped_counts == {"failed_count": 2}
    status = client.check_consumption("train", "t")
    assert (status.consumed_count, status.total_count, status.skipped_count, status.complete) == (2, 4, 2, True)


def test_failed_samples_keep_no_bytes(client: AnyClient) -> None:
    meta = put_train(client)
    client.put(meta, {"score": torch.ones(4, 3)}, state="failed")
    assert client.storage_stat().used_bytes == 0
    late = client.put(meta, {"score": torch.ones(4, 3)})  # a reward worker that did not hear of it
    assert late.global_indexes == meta.global_indexes
    assert client.storage_stat().used_bytes == 0


def test_groups_are_handed_out_whole(client: AnyClient) -> None:
    data = {"score": torch.arange(2.0)}
    asks = {**ONE, "task_name": "t", "batch_size": 2, "sampler": "grpo_group_n"}
    asks["sampler_config"] = {"n_samples_per_prompt": 2}
    client.put("train", data, groups=["b", "a"], group_size=2)
    assert client.get_meta(**asks, max_wait=0).status == "not_yet"
    client.put("train", data, groups=["a", "c"], group_size=2)
    got = client.get_meta(**asks)
    assert (got.global_indexes, got.groups) == ([1, 2], ["a", "a"])
    client.close_groups("train", ["b"])
    closed = client.get_meta(**asks, min_batch_size=1)
    assert (closed.global_indexes, closed.groups) == ([0], ["b"])
    client.put("train", {"score": torch.arange(1.0)}, groups=["d"])
    client.seal_partition("train")  # completes "d", which declared no size; "c" can no longer be whole
    assert client.get_meta(**asks).groups == ["d"]
    end = client.get_meta(**asks)
    assert (end.status, end.skipped_count) == ("end", 1)
    assert end.end.skipped_counts == {"in_incomplete_groups_count": 1}


def test_a_failed_member_takes_its_group_out_or_not_as_asked(client: AnyClient) -> None:
    meta = put_train(client)
    client.put(meta.select_samples([1]), state="failed")
    client.seal_partition("train")
    asks: dict[str, Any] = {**ONE, "batch_size": 2, "sampler": "grpo_group_n"}
    skipping = {**asks, "task_name": "skip", "sampler_config": {"n_samples_per_prompt": 2}}
    assert client.get_meta(**skipping).global_indexes == [2, 3]
    assert client.get_meta(**skipping).end.skipped_counts == {"failed_count": 1, "in_incomplete_groups_count": 1}
    config = {"n_samples_per_prompt": 2, "incomplete_groups": "take"}
    taking = {**asks, "task_name": "take", "sampler_config": config}
    taken = [client.get_meta(**taking) for _ in range(2)]
    assert sorted(index for one in taken for index in one.global_indexes) == [0, 2, 3]
    assert client.get_meta(**taking).end.skipped_counts == {"failed_count": 1}


def test_where_and_order_by(client: AnyClient) -> None:
    meta = client.put("train",
        {"score": torch.arange(6.0)},
        custom_meta=[
            {"version": 1, "tag": "a"}, {"version": 3, "tag": "b"}, {"version": 2, "tag": "a", "score": 0.5}, {},
            {"version": 3, "tag": "c", "good": True}, {"version": 5},
        ],
    )  # fmt: skip

    def rows(**asks: Any) -> list[int]:
        got = client.get_meta(**ONE, task_name=f"t{asks}", batch_size=6, min_batch_size=1, max_wait=0, **asks)
        return got.global_indexes  # type: ignore[no-any-return]

    assert rows(where=[("version", ">=", 2)]) == [1, 2, 4, 5]
    assert rows(where=[("version", ">", 1), ("version", "<", 5)]) == [1, 2, 4]
    assert rows(where=[("version", "==", 3), ("tag", "!=", "b")]) == [4]
    assert rows(where=[("tag", "in", ["a", "c"])]) == [0, 2, 4]
    assert rows(where=[("good", "==", True)]) == [4]
    assert rows(where=[("score", "<=", 0.5)]) == [2]
    assert rows(where=[("unknown", "==", 1)]) == []
    assert rows(order_by=["version"]) == [0, 2, 1, 4, 5, 3]
    assert rows(order_by=["-version", "tag"]) == [5, 1, 4, 2, 0, 3]
    client.set_custom_meta(meta.select_samples([3]), [{"version": 9}])
    assert rows(order_by=["-version"], where=[("version", ">", 4)]) == [3, 5]


def test_metadata_merges(client: AnyClient) -> None:
    meta = client.put("train", {"score": torch.zeros(2)}, keys=["a", "b"], custom_meta=[{"v": 1}, {}])
    client.set_custom_meta(meta, [{"uid": "x"}, {"v": 2}])
    client.put(meta, {"reward": torch.ones(2)}, custom_meta=[{"v": 5}, {"flag": False}])
    found, _ = client.lookup_samples("train", ["a", "b"])
    assert found.custom_meta == [{"v": 5, "uid": "x"}, {"v": 2, "flag": False}]
    client.set_custom_meta(meta, [{"v": 0.5}, {}])  # integers become doubles where that loses nothing
    assert client.lookup_samples("train", ["a", "b"])[0].custom_meta[1]["v"] == 2.0


def test_metadata_is_any_json_beside_the_values_that_claims_compare(client: AnyClient) -> None:
    given: list[dict[str, Any]] = [
        {"version": tq.JSON_NULL, "tag": {"uid": "a", "turns": [1, 2.5, None]}},
        {"version": 3, "tag": "b"},
        {"version": [4], "tag": 2**70},
        {"version": 5, "tag": True},
        {"version": "late", "tag": None},
    ]
    read = [{**one, "version": None if one["version"] is tq.JSON_NULL else one["version"]} for one in given]
    del read[4]["tag"]
    meta = client.put("train", {"score": torch.arange(5.0)}, custom_meta=given)
    assert meta.custom_meta == read
    assert client.lookup_samples("train")[0].custom_meta == read
    columns = client.describe_partition("train").custom_meta_columns
    assert [(one.name, one.kind, one.has_json) for one in columns] == [
        ("version", "int64", True), ("tag", "string", True),
    ]  # fmt: skip
    asks = {**ONE, "batch_size": 5, "min_batch_size": 1, "max_wait": 0}
    newer = client.get_meta(**{**asks, "task_name": "newer"}, where=[("version", ">=", 3)])
    assert (newer.global_indexes, newer.custom_meta) == ([1, 3], [read[1], read[3]])
    ordered = client.get_meta(**{**asks, "task_name": "ordered"}, order_by=["-version"])
    assert ordered.global_indexes == [3, 1, 0, 2, 4]  # values that are not compared come last
    assert ordered.custom_meta == [read[place] for place in (3, 1, 0, 2, 4)]

    removed = [{"version": None, "tag": None}, {"version": None}, {"version": 7}, {"tag": [1]}, {}]
    changed = client.put(meta, custom_meta=removed)
    client.set_custom_meta(meta.select_samples([4]), [{"version": tq.JSON_NULL}])
    expected = [{}, {"tag": "b"}, {"version": 7, "tag": 2**70}, {"version": 5, "tag": [1]}, {"version": None}]
    assert changed.custom_meta == [*expected[:4], {"version": "late"}]
    assert client.lookup_samples("train")[0].custom_meta == expected
    assert client.get_meta(**{**asks, "task_name": "now"}, where=[("version", ">", 3)]).global_indexes == [2, 3]


def test_metadata_that_another_client_has_as_json_is_compared_where_it_can_be(client: AnyClient) -> None:
    meta = client.put("train", {"score": torch.arange(3.0)}, custom_meta=[{"v": [1]}, {"v": 2}, {}])
    assert meta.custom_meta == [{"v": [1]}, {"v": 2}, {}]
    client.set_custom_meta(meta, [{"v": "x"}, {"v": 2.5}, {"v": 9}])
    found = client.lookup_samples("train")[0]
    assert found.custom_meta == [{"v": "x"}, {"v": 2.5}, {"v": 9}]
    assert meta.concat([found.select_samples([2]), found.select_samples([0])]).custom_meta == [{"v": 9}, {"v": "x"}]


def test_production(client: AnyClient) -> None:
    client.create_partition("train", expected_samples=4)
    meta = client.put("train", {"score": torch.zeros(3)})
    client.put(meta.select_samples([0, 1]), {"reward": torch.zeros(2)})
    status = client.check_production("train", ["score", "reward"])
    assert (status.produced_count, status.total_count, status.complete) == (2, 3, False)
    client.put(meta.select_samples([2]), {"reward": torch.zeros(1)})
    assert not client.check_production("train", ["reward"]).complete
    last = client.insert("train", 1)
    assert client.describe_partition("train").summary.sealed  # the expected number seals
    assert not client.check_production("train", ["reward"]).complete
    client.put(last, state="failed")
    assert client.check_production("train", ["reward"]).complete


def test_partitions(client: AnyClient) -> None:
    fields = [tq.FieldSpec("score", dtype="float32", layout="dense", row_shape=(3,))]
    first = client.create_partition("train@0", expected_samples=8, fields=fields)
    assert client.create_partition("train@0", expected_samples=8, fields=fields) == first
    put_train(client, "train@1")
    client.insert("eval", 1)
    assert [one.partition_id for one in client.list_partitions()] == ["eval", "train@0", "train@1"]
    assert [one.partition_id for one in client.list_partitions("train@")] == ["train@0", "train@1"]
    described = client.describe_partition("train@0")
    assert (described.expected_samples, described.fields[0].spec) == (8, fields[0])
    assert client.seal_partition("train@1") == 4
    assert client.clear_partition("train@1") == 4
    assert [one.partition_id for one in client.list_partitions()] == ["eval", "train@0"]
    assert client.storage_stat().used_bytes == 0
    assert client.create_partition("train@1") != client.create_partition("train@0", expected_samples=8, fields=fields)


def test_samplers_are_listed(client: AnyClient) -> None:
    listed = {one.name: one for one in client.list_samplers()}
    assert {"sequential", "grpo_group_n", "rank_aware", "seqlen_balanced"} <= set(listed)
    options = {option.name: option for option in listed["packed"].options}
    assert list(options)[:2] == ["optimizer_steps", "pack_max_length"]
    assert options["pack_max_length"].default_json is None
    assert (options["overlong"].type, options["overlong"].default_json) == ("one of error, truncate, drop", '"error"')
    assert "samples with more than `pack_max_length` tokens" in options["overlong"].summary
    assert all(one.summary for one in listed.values())


def test_another_run_does_not_overwrite_the_samples_of_a_sealed_partition(client: AnyClient) -> None:
    keys = ["a", "b"]
    client.put("train", {"x": torch.tensor([1, 2])}, keys=keys)
    client.put("train", {"x": torch.tensor([3, 4])}, keys=keys)  # until it is sealed
    client.seal_partition("train")
    for more in ({"keys": keys}, {"keys": ["b"]}, {"keys": keys, "key_mode": "upsert", "custom_meta": [{"v": 1}] * 2}):
        count = len(more["keys"])
        with pytest.raises(
            tq.errors.PartitionSealedError, match=r"already has field 'x', perhaps from another run.*existing"
        ):
            client.put("train", {"x": torch.zeros(count, dtype=torch.int64), "y": torch.zeros(count)}, **more)
    found, _ = client.lookup_samples("train")
    assert client.get_data(found, data_fields=["x"])["x"].tolist() == [3, 4]
    assert (found.data_fields, found.custom_meta) == (["x"], [{}, {}])
    # What comes late to samples of the same run.
    client.put("train", {"reward": torch.ones(1)}, keys=["b"])
    client.put("train", {"reward": torch.ones(1)}, keys=["a"])
    client.put("train", keys=keys, custom_meta=[{"v": 2}] * 2)
    client.put("train", {"reward": torch.full((2,), 2.0)}, keys=keys, key_mode="existing")
    client.put(found, {"x": torch.tensor([5, 6])})
    with pytest.raises(tq.errors.PartitionSealedError, match="already has field 'reward'"):
        client.put("train", {"reward": torch.ones(2)}, keys=keys)
    assert client.get_data(client.lookup_samples("train")[0])["reward"].tolist() == [2.0, 2.0]
