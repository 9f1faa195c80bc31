"""Fields that the samples of a group share: stored and sent once, ready with the value, freed with the group."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
import torch
from live_server import AnyClient, LiveServer, StartServer

import tq_service as tq
from tq_service.client_probes import probes
from tq_service.v1 import commit_pb2

PIXELS = tq.FieldSpec("pixels", scope="group")
CLAIM: dict[str, Any] = {"partition_id": "train", "task_name": "train", "batch_size": 4}


@pytest.fixture
def client(start_server: StartServer, client_kind: Any) -> AnyClient:
    client = start_server().client(client_kind)
    client.create_partition("train", fields=[PIXELS])
    return client


def names_of(count: int, size: int) -> list[str]:
    """Return the group of each of the samples of so many groups."""
    return [f"g{group}" for group in range(count) for _ in range(size)]


def put_rows(client: AnyClient, count: int, size: int, **more: Any) -> tq.BatchMeta:
    """Put samples of groups, whose token is their number."""
    data = {"tokens": torch.arange(count * size)}
    meta: tq.BatchMeta = client.put("train", data, groups=names_of(count, size), group_size=size, **more)
    return meta


def status_of(client: AnyClient) -> tq.PartitionDescription:
    description: tq.PartitionDescription = client.describe_partition("train")
    return description


VALUES: dict[str, Any] = {
    "dense": torch.arange(24, dtype=torch.uint8).reshape(4, 2, 3),
    "scalar": torch.tensor([0.5, 1.5, 2.5, 3.5], dtype=torch.bfloat16),
    "uint16": torch.arange(8).to(torch.uint16).reshape(4, 2),
    "float8": torch.arange(8).to(torch.float8_e4m3fn).reshape(4, 2),
    "jagged": [torch.arange(size) for size in (3, 1, 0, 7)],
    "images": [torch.ones(2, 3), torch.zeros(4, 1), torch.ones(1, 1), torch.zeros(2, 3)],
    "text": ["a", "bc", "", "d"],
    "object": [{"size": (1, 2)}, None, [1], {"array": torch.ones(2)}],
}


def rows_of(values: Any) -> list[Any]:
    """Return the rows of a field as lists, or as they are."""
    rows = values.unbind() if isinstance(values, torch.Tensor) else values
    return [row.float().tolist() if isinstance(row, torch.Tensor) else row for row in rows]


def plain(row: Any) -> Any:
    if isinstance(row, dict):
        return {name: plain(value) for name, value in row.items()}
    return row.tolist() if isinstance(row, torch.Tensor) else row


def test_each_sample_has_the_value_of_its_group_however_it_is_read(
    service_of_each_way: LiveServer, client_kind: Any
) -> None:
    client = service_of_each_way.client(client_kind)
    client.create_partition("train", fields=[tq.FieldSpec(name, scope="group") for name in VALUES])
    client.put_groups("train", {name: VALUES[name] for name in list(VALUES)[:4]}, groups=list("abcd"))
    order = [2, 0, 0, 3, 1, 2, 2]
    data = {"tokens": torch.arange(7)}
    client.put("train", data, groups=["abcd"[group] for group in order])
    client.put_groups("train", {name: VALUES[name] for name in list(VALUES)[4:]}, groups=list("abcd"))
    found, _ = client.lookup_samples("train")
    for rows in (range(7), [6, 5], [1, 2], [3], [4, 0, 4, 1]):
        located = found.select_samples(rows) if len(set(rows)) == len(rows) else None
        where = {"target": located} if located else {"target": "train", "global_indexes": list(rows)}
        batch = client.get_data(**where)
        assert batch.batch_size == (len(rows),)
        assert batch["tokens"].tolist() == list(rows)
        for name, values in VALUES.items():
            expected = [values[order[row]] for row in rows]
            assert list(map(plain, rows_of(batch[name]))) == list(map(plain, rows_of(expected))), name
        once = client.get_data(**where, expand=False)
        assert once.batch_size == ()
        assert once["tokens"].tolist() == list(rows)
        for name, values in VALUES.items():
            kept = rows_of(once[name])
            assert len(kept) == len({order[row] for row in rows})
            expected = [values[order[row]] for row in rows]
            indexed = [kept[place] for place in once["group_index"].tolist()]
            assert list(map(plain, indexed)) == list(map(plain, rows_of(expected))), name
    some = client.get_data("train", global_indexes=[1, 3], data_fields=["dense"], layout="jagged")
    assert rows_of(some["dense"]) == rows_of([VALUES["dense"][0], VALUES["dense"][3]])


class Received:
    """Counts the bytes that gets receive."""

    def __init__(self) -> None:
        self.total_bytes = 0

    def __enter__(self) -> Received:
        probes.append(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *exception: object) -> None:
        probes.remove(self)  # type: ignore[arg-type]

    def received(self, value_bytes: int) -> None:
        self.total_bytes += value_bytes

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def test_a_step_of_grpo_stores_and_fetches_each_image_once(start_server: StartServer, client_kind: Any) -> None:
    group_count, size, image_bytes = 64, 8, 1 << 16
    client = start_server(shared_memory="off").client(client_kind)
    images = torch.randint(0, 256, (group_count, image_bytes), dtype=torch.uint8)
    used, received, batches = {}, {}, {}
    for scope in ("row", "group"):
        client.create_partition(scope, fields=[tq.FieldSpec("pixels", scope=scope)])
        names, data = names_of(group_count, size), {"tokens": torch.arange(group_count * size)}
        if scope == "group":
            client.put_groups(scope, {"pixels": images}, groups=[f"g{group}" for group in range(64)])
        else:
            data["pixels"] = images.repeat_interleave(size, dim=0)
        client.put(scope, data, groups=names, group_size=size)
        used[scope] = client.describe_partition(scope).used_bytes
        with Received() as counted:
            parts = []
            for dp_rank in range(4):
                meta = client.get_meta(
                    partition_id=scope,
                    task_name="train",
                    data_fields=["tokens", "pixels"],
                    batch_size=group_count * size // 4,
                    dp_rank=dp_rank,
                    dp_size=4,
                    batch_index=0,
                    sampler="grpo_group_n",
                    sampler_config={"n_samples_per_prompt": size},
                )
                parts.append(client.get_data(meta))
        received[scope] = counted.total_bytes
        batches[scope] = torch.cat([part["pixels"] for part in parts])
        assert torch.cat([part["tokens"] for part in parts]).unique().numel() == group_count * size
    token_bytes = 8 * group_count * size
    for bytes_of in (used, received):
        assert 7 * (bytes_of["group"] - token_bytes) <= bytes_of["row"] - token_bytes
        assert bytes_of["group"] == group_count * image_bytes + token_bytes
    assert torch.equal(batches["group"], batches["row"])


def test_a_sample_is_ready_once_its_group_has_a_value(client: AnyClient) -> None:
    claim = {**CLAIM, "data_fields": ["tokens", "pixels"], "min_batch_size": 1, "max_wait": 0.0}
    put_rows(client, 2, 2)
    assert client.get_meta(**claim).status == "not_yet"
    client.put_groups("train", {"pixels": torch.ones(1, 2)}, groups=["g1"])
    assert client.get_meta(**claim).global_indexes == [2, 3]
    client.put("train", {"tokens": torch.tensor([4, 5])}, groups=["g2", "g3"])
    assert client.get_meta(**claim).status == "not_yet"
    client.put_groups("train", {"pixels": torch.ones(3, 2)}, groups=["g0", "g2", "g4"])
    assert client.get_meta(**claim).global_indexes == [0, 1, 4]
    client.put("train", {"tokens": torch.tensor([6])}, groups=["g4"])  # its image came before it
    assert client.get_meta(**claim).global_indexes == [6]


def test_values_go_with_the_last_sample_of_their_group_and_when_they_are_put_again(client: AnyClient) -> None:
    put_rows(client, 2, 2)
    client.put_groups("train", {"pixels": torch.ones(2, 100)}, groups=["g0", "g1"])
    assert status_of(client).used_bytes == 4 * 8 + 2 * 400
    client.put_groups("train", {"pixels": torch.zeros(1, 100)}, groups=["g1"], existing=True)
    assert status_of(client).used_bytes == 4 * 8 + 2 * 400
    client.clear_samples("train", global_indexes=[0])
    client.fail_samples("train", global_indexes=[1])
    assert status_of(client).used_bytes == 2 * 8 + 2 * 400
    batch = client.get_data("train", global_indexes=[2, 3])
    assert batch["pixels"].tolist() == torch.zeros(2, 100).tolist()
    assert batch["pixels"].stride(0) == 0  # of one group: one memory
    client.clear_samples("train", global_indexes=[1])
    assert status_of(client).used_bytes == 2 * 8 + 400
    client.clear_samples("train", groups=["g1"])
    assert status_of(client).used_bytes == 0
    client.put("train", {"tokens": torch.ones(1)}, groups=["g1"])  # another group of the name
    with pytest.raises(tq.errors.CellNotFoundError, match="'pixels'"):
        client.get_data("train", global_indexes=[4], data_fields=["pixels"])


def test_groups_that_get_no_samples_go_by_name_and_with_the_seal(client: AnyClient) -> None:
    client.put_groups("train", {"pixels": torch.ones(3, 100)}, groups=["a", "b", "c"])
    found, missing = client.lookup_samples("train", groups=["a", "d"])
    assert found.size == 0
    assert missing == ["a", "d"]
    assert client.clear_samples("train", groups=["a", "d"]) == 0
    assert status_of(client).used_bytes == 800
    client.put("train", {"tokens": torch.ones(1)}, groups=["b"])
    client.seal_partition("train")
    assert status_of(client).used_bytes == 404
    client.put_groups("train", {"pixels": torch.zeros(1, 100)}, groups=["b"])
    with pytest.raises(tq.errors.PartitionSealedError, match="is sealed and has no group 'c'"):
        client.put_groups("train", {"pixels": torch.ones(2, 100)}, groups=["b", "c"])
    assert client.get_data("train", global_indexes=[0])["pixels"].sum() == 0


def test_what_does_not_fit_is_refused_and_changes_nothing(client: AnyClient) -> None:
    row = torch.ones(1, 2)
    put_rows(client, 1, 1)
    before = status_of(client)
    with pytest.raises(tq.errors.InvalidArgumentError, match=r"field 'pixels' .* pass one value per group"):
        client.put("train", {"pixels": row})
    with pytest.raises(tq.errors.InvalidArgumentError, match=r"field 'tokens' .* declare it with group scope"):
        client.put_groups("train", {"tokens": row}, groups=["g0"])
    with pytest.raises(tq.errors.InvalidArgumentError, match="group 'a' occurs 2 times"):
        client.put_groups("train", {"pixels": torch.ones(2, 2)}, groups=["a", "a"])
    with pytest.raises(tq.errors.InvalidArgumentError, match="has 2 names, including an empty name"):
        client.put_groups("train", {"pixels": torch.ones(2, 2)}, groups=["a", ""])
    with pytest.raises(tq.errors.InvalidArgumentError, match="groups has 1 names, but field 'pixels' has 2 rows"):
        client.put_groups("train", {"pixels": torch.ones(2, 2)}, groups=["a"])
    with pytest.raises(tq.errors.NotFoundError, match="has no samples of group 'a'"):
        client.put_groups("train", {"pixels": row}, groups=["a"], existing=True)
    with pytest.raises(tq.errors.PartitionNotFoundError, match="no partition 'other'"):
        client.put_groups("other", {"pixels": row}, groups=["a"])
    with pytest.raises(tq.errors.InvalidArgumentError, match="scope 'groups' is unknown; use one of row, group"):
        tq.FieldSpec("pixels", scope="groups")
    with pytest.raises(tq.errors.AlreadyExistsError, match=r"with different settings: .*one per group"):
        client.create_partition("train", fields=[tq.FieldSpec("pixels")])
    assert status_of(client).used_bytes == before.used_bytes
    assert status_of(client).fields == before.fields
    assert status_of(client).group_count == 1
    client.put_groups("train", {"pixels": row}, groups=["g0"])
    with pytest.raises(tq.errors.FieldMismatchError, match="field 'pixels' is float32"):
        client.put_groups("train", {"pixels": torch.ones(1, 2).long()}, groups=["b"])
    assert status_of(client).group_count == 1


def test_a_write_once_field_takes_one_value_of_each_group(client: AnyClient) -> None:
    client.create_partition("once", fields=[tq.FieldSpec("pixels", scope="group", write_once=True)])
    client.put_groups("once", {"pixels": torch.ones(1, 2)}, groups=["a"])
    with pytest.raises(tq.errors.AlreadyExistsError, match="group 'a' of partition 'once' already has a value"):
        client.put_groups("once", {"pixels": torch.ones(2, 2)}, groups=["b", "a"])
    client.put_groups("once", {"pixels": torch.ones(1, 2)}, groups=["b"])
    (field,) = client.describe_partition("once").fields
    assert (field.spec.scope, field.spec.write_once, field.produced_count) == ("group", True, 0)


def test_fields_and_fetched_rows_say_which_groups_share(client: AnyClient) -> None:
    meta = put_rows(client, 2, 2)
    client.put_groups("train", {"pixels": [torch.ones(2), torch.ones(3)]}, groups=["g0", "g1"])
    by_name = {field.spec.name: field for field in status_of(client).fields}
    assert by_name["pixels"].produced_count == 4
    assert by_name["pixels"].spec == tq.FieldSpec("pixels", "float32", "jagged", (-1,), scope="group")
    found, _ = client.lookup_samples("train")
    assert {spec.name: spec.scope for spec in found.fields} == {"pixels": "group", "tokens": "row"}
    assert client.check_production("train", ["pixels"]).produced_count == 4
    shared = client.get_data(found.select_samples([1, 2, 3]), data_fields=["pixels"], expand=False)
    assert shared["group_index"].tolist() == [0, 1, 1]
    assert client.get_data(meta, data_fields=["tokens"], expand=False)["tokens"].tolist() == [0, 1, 2, 3]
    empty = client.get_data(found.select_samples([]), expand=False)
    assert [len(rows_of(empty[name])) for name in ("pixels", "tokens", "group_index")] == [0, 0, 0]


def test_tensors_of_the_caller_take_rows_of_groups(client: AnyClient) -> None:
    put_rows(client, 2, 2)
    images = torch.arange(8.0).reshape(2, 4)
    client.put_groups("train", {"pixels": images}, groups=["g0", "g1"])
    where = {"target": "train", "global_indexes": [3, 0, 1], "data_fields": ["pixels"]}
    out = {"pixels": torch.zeros(3, 4)}
    assert client.get_data(**where, out=out)["pixels"] is not None
    assert torch.equal(out["pixels"], images[[1, 0, 0]])
    with pytest.raises(tq.errors.InvalidArgumentError, match="out contains field 'pixels', but with expand=False"):
        client.get_data(**where, out=out, expand=False)


def test_an_explanation_says_that_groups_lack_a_value(client: AnyClient) -> None:
    put_rows(client, 2, 2)
    client.put("train", {"tokens": torch.ones(3).long()})
    client.put_groups("train", {"pixels": torch.ones(1, 2)}, groups=["g0"])
    meta = client.get_meta(**CLAIM, data_fields=["pixels"], min_batch_size=4, explain=True, max_wait=0.0)
    (lack,) = meta.waiting_for.not_ready
    assert (lack.kind, lack.name, lack.sample_count) == ("field", "pixels", 5)
    assert "5 lack field 'pixels' (their groups lack a value" in meta.waiting_for.text
    assert "3 of them are not in a group and will never have a value)" in meta.waiting_for.text


def test_a_commit_of_groups_says_nothing_of_samples(start_server: StartServer) -> None:
    server = start_server()
    write = commit_pb2.SampleWrite(partition_id="train", row_count=1, groups=["a"], of_groups=True)
    with pytest.raises(grpc.RpcError, match="of_groups is set without a placement"):
        server.controller.Commit(commit_pb2.CommitRequest(request_id=bytes(16), write=write))


def test_gets_without_groups_are_as_before(client: AnyClient) -> None:
    meta = client.put("other", {"tokens": np.arange(3)})
    assert client.get_data(meta).batch_size == (3,)
    once = client.get_data(meta, expand=False)
    assert once.batch_size == ()
    assert sorted(once.keys()) == ["tokens"]


def test_parts_and_padding_are_those_of_rows_that_samples_have_of_their_own(client: AnyClient) -> None:
    client.put_groups("train", {"pixels": [torch.arange(3), torch.arange(5)]}, groups=["g0", "g1"])
    tokens = [torch.arange(length) for length in (2, 4, 1, 3)]
    meta = client.put("train", {"tokens": tokens}, groups=names_of(2, 2), group_size=2)
    got = client.get_data(meta, data_fields=["tokens", "pixels"], slices={"tokens": (0, 2)}, padded=True, mask=True)
    assert got["tokens"].tolist() == [[0, 1], [0, 1], [0, 0], [0, 1]]
    assert got["tokens_mask"].sum(dim=1).tolist() == [2, 2, 1, 2]
    assert [row.tolist() for row in got["pixels"]] == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    rows = client.get_data(
        meta, data_fields=["tokens", "pixels"], slices={"tokens": [(0, 1), (1, 2), (0, 1), (0, 3)]}, expand=False
    )
    assert [row.tolist() for row in rows["tokens"]] == [[0], [1], [0], [0, 1, 2]]
    assert [row.tolist() for row in rows["pixels"]] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert rows["group_index"].tolist() == [0, 0, 1, 1]
    for option in ({"slices": {"pixels": (0, 1)}}, {"padded": ["pixels"]}):
        with pytest.raises(
            tq.errors.InvalidArgumentError, match="has field 'pixels', whose values are shared by groups"
        ):
            client.get_data(meta, data_fields=["tokens", "pixels"], **option)
