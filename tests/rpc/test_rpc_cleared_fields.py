"""Fields of samples that are cleared: bytes are freed, readers and claims miss them, and they can be put again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from secrets import token_bytes
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from live_server import AnyClient, LiveServer, StartServer
from rpc_samples import snapshot, violations_of

import tq_service as tq
from tq_service.machine.samples import CellsCleared
from tq_service.machine.state_machine import Change
from tq_service.serving import lookup
from tq_service.serving.catalog import Catalog
from tq_service.v1 import controller_service_pb2 as pb

ROWS = 4
IMAGE_BYTES = 1 << 16
RANK: dict[str, Any] = {"partition_id": "train", "task_name": "train", "dp_rank": 0, "dp_size": 1, "batch_index": 0}


def images(first: int = 0, count: int = ROWS) -> torch.Tensor:
    numbers = torch.arange(first, first + count, dtype=torch.uint8)
    return numbers[:, None].expand(count, IMAGE_BYTES).contiguous()


def put_train(client: AnyClient, **more: Any) -> tq.BatchMeta:
    data = {"ids": torch.arange(ROWS), "image": images()}
    given = {"keys": list("abcd"), "groups": list("gghh"), "custom_meta": [{"total_lengths": row} for row in range(4)]}
    meta: tq.BatchMeta = client.put("train", data, **{**given, **more})
    return meta


def stored_bytes(client: AnyClient) -> int:
    """Return the bytes that the storage service holds."""
    value: int = client.storage_stat().used_bytes
    return value


def until_freed(client: AnyClient, most_bytes: int) -> None:
    give_up_at = time.monotonic() + 20
    while stored_bytes(client) > most_bytes:
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_bytes_are_freed_and_the_rest_of_the_samples_stays(
    service_of_each_way: LiveServer, client_kind: Any, one_by_one: bool
) -> None:
    client = service_of_each_way.client(client_kind)
    meta = put_train(client)
    client.get_meta(partition_id="train", task_name="seen", data_fields=["image"], batch_size=2)
    before = client.describe_partition("train").used_bytes
    assert before == ROWS * (IMAGE_BYTES + 8)
    if one_by_one:
        assert [client.clear_fields(meta.select_samples([row]), data_fields=["image"]) for row in range(ROWS)] == [
            1
        ] * 4
    else:
        assert client.clear_fields(meta, data_fields=["image", "image"]) == ROWS
    assert client.clear_fields(meta, data_fields=["image"]) == 0
    assert client.describe_partition("train").used_bytes == ROWS * 8
    found, missing = client.lookup_samples("train", keys=["d", "a"], task_name="seen")
    assert (found.global_indexes, found.groups, missing) == ([3, 0], ["h", "g"], [])
    assert (found.data_fields, found.consumed.tolist()) == (["ids"], [False, True])
    assert found.custom_meta == [{"total_lengths": 3}, {"total_lengths": 0}]
    assert client.get_data(found)["ids"].tolist() == [3, 0]
    assert client.check_production("train", ["image"]).produced_count == 0
    assert client.check_production("train", ["ids", "image"]).produced_count == 0
    client.put(meta.select_samples([2]), {"image": images(7, 1)})
    assert client.check_production("train", ["image"]).produced_count == 1
    assert client.get_data("train", keys=["c"])["image"][0, 0] == 7


def test_the_storage_service_frees_the_bytes(server: LiveServer, client: AnyClient) -> None:
    meta = put_train(client)
    held = stored_bytes(client)
    client.clear_fields(meta.select_samples([1]), data_fields=["image"])
    assert stored_bytes(client) == held  # a put is moved when more than half of it is gone
    client.clear_fields(meta, data_fields=["image"])
    until_freed(client, held - ROWS * IMAGE_BYTES)
    assert client.get_data(meta, data_fields=["ids"])["ids"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_get_of_a_cleared_field_names_the_sample(client: AnyClient, all_of_them: bool) -> None:
    put_train(client)
    claimed = client.get_meta(**RANK, data_fields=["ids", "image"], batch_size=ROWS)
    assert client.get_data(claimed)["image"][:, 0].tolist() == [0, 1, 2, 3]
    client.clear_fields("train", keys=list("abcd") if all_of_them else ["a", "b"], data_fields=["image"])
    again = client.get_meta(**RANK, data_fields=["ids", "image"], batch_size=ROWS)  # by a restarted rank
    assert again.global_indexes == claimed.global_indexes
    for meta in (claimed, again):
        assert meta.data_fields == ["ids", "image"]
        with pytest.raises(
            tq.errors.CellNotFoundError, match=r"sample 0 \(key 'a'\).* has no 'image' yet, or no longer"
        ):
            client.get_data(meta)
        assert client.get_data(meta, data_fields=["ids"])["ids"].tolist() == [0, 1, 2, 3]
    left = client.get_data("train", keys=list("abcd"), data_fields=["image"], missing="skip")
    assert left["image"][:, 0].tolist() == ([] if all_of_them else [2, 3])
    client.put(claimed, {"image": images(4)})
    for meta in (claimed, again):
        assert client.get_data(meta)["image"][:, 0].tolist() == [4, 5, 6, 7]


def test_claims_wait_for_the_field_and_others_do_not(client: AnyClient) -> None:
    meta = put_train(client)
    client.seal_partition("train")
    client.clear_fields(meta.select_samples([0, 2]), data_fields=["image"])
    ask = {"partition_id": "train", "batch_size": ROWS, "min_batch_size": 1, "max_wait": 0.0}
    assert client.get_meta(**ask, task_name="ids", data_fields=["ids"]).size == ROWS
    assert client.get_meta(**ask, task_name="images", data_fields=["image"]).keys == ["b", "d"]
    waiting = client.get_meta(**ask, task_name="images", data_fields=["image"], explain=True)
    assert waiting.status == "not_yet"
    assert [(lack.name, lack.sample_count) for lack in waiting.waiting_for.not_ready] == [("image", 2)]
    client.put(meta.select_samples([0, 2]), {"image": images(0, 2)})
    assert client.get_meta(**ask, task_name="images", data_fields=["image"]).keys == ["a", "c"]
    assert client.get_meta(**ask, task_name="images", data_fields=["image"]).status == "end"


def test_a_waiting_claim_gets_only_samples_that_have_the_field(client: AnyClient) -> None:
    meta = put_train(client)
    with ThreadPoolExecutor() as threads:
        ask = {"partition_id": "train", "task_name": "t", "data_fields": ["image"], "max_wait": 20.0}
        call = threads.submit(client.get_meta, **ask, batch_size=ROWS + 1)
        while not client.status().waits:
            time.sleep(0.01)
        client.clear_fields(meta.select_samples([0]), data_fields=["image"])
        client.put("train", {"image": images(4, 1)}, keys=["e"])
        assert not call.done()
        client.put("train", {"image": images(5, 1)}, keys=["f"])
        assert call.result(timeout=20).keys == list("bcdef")


def test_a_put_that_waits_for_bytes_gets_them(client: AnyClient) -> None:
    client.create_partition("train", max_bytes=ROWS * (IMAGE_BYTES + 8))
    meta = put_train(client)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(client.put, "train", {"ids": torch.tensor([9])}, keys=["e"])
        while not client.describe_partition("train").waiting_put_count:
            time.sleep(0.01)
        client.clear_fields(meta.select_samples([3]), data_fields=["image"])
        assert call.result(timeout=20).global_indexes == [4]


def test_samples_are_selected_as_for_a_clear(client: AnyClient) -> None:
    put_train(client)

    def cleared(**selection: Any) -> list[int]:
        """Clear the field of a selection; return the samples that lost it, and put it again."""
        count = client.clear_fields("train", data_fields=["image"], **selection)
        found, _ = client.lookup_samples("train")
        has = found.produced.get("image", np.zeros(ROWS, np.bool_))
        lost: list[int] = np.flatnonzero(~has).tolist()
        assert count == len(lost)
        if lost:
            client.put(found.select_samples(lost), {"image": images(0, count)})
        return lost

    assert cleared(keys=["b", "none"]) == [1]
    assert cleared(global_indexes=[3, 99, 0]) == [0, 3]
    assert cleared(groups=["h", "none"]) == [2, 3]
    assert cleared(where=[("total_lengths", ">", 1)]) == [2, 3]
    assert cleared(groups=["g"], where=[("total_lengths", ">", 0)]) == [1]
    assert cleared(keys=[]) == cleared(groups=[]) == cleared() == []
    client.get_meta(partition_id="train", task_name="t", data_fields=["ids"], batch_size=2)
    assert cleared(task_name="t") == [2, 3]
    client.fail_samples("train", keys=["d"])
    assert client.clear_fields("train", data_fields=["ids"], skipped_by="t") == 0  # it has lost all
    assert client.clear_fields("train", data_fields=["ids", "image"], keys=list("abcd")) == 6


def test_what_cannot_be_cleared_is_refused_and_changes_nothing(server: LiveServer, client: AnyClient) -> None:
    meta = put_train(client)
    before = snapshot(client)
    with pytest.raises(tq.errors.FieldNotFoundError, match=r"no field 'images'; .*'image'"):
        client.clear_fields(meta, data_fields=["ids", "images"])
    with pytest.raises(
        tq.errors.InvalidArgumentError, match="data_fields is empty; specify the fields to clear"
    ) as raised:
        client.clear_fields(meta, data_fields=[])
    assert raised.value.field == "data_fields"
    with pytest.raises(tq.errors.InvalidArgumentError, match="data_fields is 'ids', expected a list of strings"):
        client.clear_fields(meta, data_fields="ids")
    with pytest.raises(tq.errors.PartitionNotFoundError):
        client.clear_fields("trian", data_fields=["ids"], keys=["a"])
    with pytest.raises(tq.errors.TaskNotFoundError):
        client.clear_fields("train", data_fields=["ids"], task_name="t")
    with pytest.raises(tq.errors.InvalidArgumentError, match="groups and samples are both set"):
        client.clear_fields("train", data_fields=["ids"], keys=["a"], groups=["g"])
    request = pb.ClearFieldsRequest(request_id=token_bytes(16), partition_id="train", keys=["a"])
    with pytest.raises(grpc.RpcError) as refused:
        server.controller.ClearFields(request)
    assert violations_of(refused.value) == ["data_fields"]
    assert client.clear_fields(meta.select_samples([]), data_fields=["ids"]) == 0
    assert snapshot(client) == before
    assert client.clear_fields(meta, data_fields=["ids", "images"], missing_ok=True) == ROWS
    assert client.clear_fields("trian", data_fields=["ids"], keys=["a"], missing_ok=True) == 0


def test_a_repeat_gets_the_same_answer_though_the_field_is_forgotten(server: LiveServer, client: AnyClient) -> None:
    put_train(client)
    request = pb.ClearFieldsRequest(
        request_id=token_bytes(16), partition_id="train", keys=list("abcd"), data_fields=["image"]
    )
    answers = [server.controller.ClearFields(request).cleared_count for _ in range(2)]
    assert answers == [ROWS, ROWS]
    assert [field.spec.name for field in client.describe_partition("train").fields] == ["ids"]
    client.put("train", {"image": images()}, keys=list("abcd"))
    assert server.controller.ClearFields(request).cleared_count == ROWS
    assert client.check_production("train", ["image"]).produced_count == ROWS


def test_fields_of_groups_are_cleared_by_the_names_of_groups(client: AnyClient) -> None:
    client.create_partition("train", fields=[tq.FieldSpec("pixels", scope="group")])
    client.put_groups("train", {"pixels": images(0, 3)}, groups=["g", "h", "later"])
    meta = put_train(client)
    before = snapshot(client)
    for selection in (
        {"target": meta},
        {"target": "train", "where": [("total_lengths", ">", 0)]},
        {"target": "train", "groups": ["g"], "where": [("total_lengths", ">", 0)]},
        {"target": "train", "groups": ["g"], "rollouts": ["r"]},
    ):
        with pytest.raises(
            tq.errors.InvalidArgumentError, match=r"'pixels' .* has group scope.* Select groups only"
        ) as raised:
            client.clear_fields(**selection, data_fields=["ids", "pixels"])
        assert raised.value.field == "data_fields"
    assert snapshot(client) == before
    used = client.describe_partition("train").used_bytes
    assert client.clear_fields("train", groups=["g", "later", "none"], data_fields=["pixels", "ids"]) == 4
    assert client.describe_partition("train").used_bytes == used - 2 * IMAGE_BYTES - 2 * 8
    found, _ = client.lookup_samples("train")
    assert found.produced["pixels"].tolist() == [False, False, True, True]
    assert found.produced["ids"].tolist() == [False, False, True, True]
    client.put("train", {"ids": torch.tensor([9])}, groups=["later"])
    with pytest.raises(tq.errors.CellNotFoundError, match="'pixels'"):
        client.get_data("train", global_indexes=[0], data_fields=["pixels"])
    client.put_groups("train", {"pixels": images(9, 1)}, groups=["g"], existing=True)
    assert client.get_data(meta.select_samples([0, 1]), data_fields=["pixels"])["pixels"][:, 0].tolist() == [9, 9]


def test_many_samples_and_groups_are_cleared_in_parts(client: AnyClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_CLEARED_AT_ONCE", 700)
    monkeypatch.setattr(lookup, "_PUTS_CLEARED_AT_ONCE", 3)
    client.create_partition("train", fields=[tq.FieldSpec("pixels", scope="group")])
    names = [f"g{number}" for number in range(400)]
    client.put_groups("train", {"pixels": torch.zeros(400)}, groups=names)
    client.put("train", {"ids": torch.zeros(2000), "x": torch.zeros(2000)}, groups=names * 5)
    real, sizes = Catalog.commit, []

    def commit(catalog: Catalog, change: Change) -> Any:
        if isinstance(change, CellsCleared):
            sizes.append((change.global_indexes.size, len(change.groups)))
        return real(catalog, change)

    monkeypatch.setattr(Catalog, "commit", commit)
    assert client.clear_fields("train", groups=names, data_fields=["pixels", "ids"]) == 2400
    assert max(rows for rows, _ in sizes) <= 700
    assert max(groups for _, groups in sizes) == 3
    assert client.describe_partition("train").used_bytes == 2000 * 4


def test_what_was_cleared_stays_so_over_restarts_and_checkpoints(start_server: StartServer, tmp_path: Any) -> None:
    settings = {"data_dir": str(tmp_path / "data"), "checkpoint_dir": str(tmp_path / "checkpoints")}
    server = start_server(**settings)
    client = server.client()
    meta = put_train(client)
    client.put(meta, {"late": torch.arange(ROWS)})
    client.clear_fields(meta.select_samples([0, 1]), data_fields=["image"])
    client.checkpoint("one")
    client.clear_fields(meta, data_fields=["late"])
    expected = client.lookup_samples("train")[0].produced

    def check(client: AnyClient, has_late: bool) -> None:
        found = client.lookup_samples("train")[0]
        assert found.produced["image"].tolist() == [False, False, True, True]
        assert ("late" in found.produced) == has_late
        with pytest.raises(tq.errors.CellNotFoundError):
            client.get_data(meta, data_fields=["image"])
        kept = client.get_data("train", keys=["c", "d"], data_fields=["image", "ids"])
        assert (kept["image"][:, 0].tolist(), kept["ids"].tolist()) == ([2, 3], [2, 3])

    check(client, has_late=False)
    assert set(expected) == {"ids", "image"}
    server.stop()
    client = start_server(**settings).client()
    check(client, has_late=False)
    with pytest.raises(tq.errors.CellNotFoundError):  # it was a field
        client.get_data(meta, data_fields=["late"])
    client.restore("one", replace=True)
    found = client.lookup_samples("train")[0]
    assert (found.produced["image"].tolist(), found.produced["late"].tolist()) == ([False] * 2 + [True] * 2, [True] * 4)
