"""Unfinished samples that grow by appends: what readers get, what is refused, what a retry and a restart find."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from live_server import AnyClient, LiveServer, LoopThread, StartServer

import tq_service as tq
from tq_service.state import extents
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1.metadata_pb2 import LeasedClaim

SHORT, LONG = 0.3, 60.0
READS = {"partition_id": "train", "task_name": "train", "data_fields": ["tokens", "reward"]}


@pytest.fixture
def client(start_server: StartServer, client_kind: Any) -> AnyClient:
    return start_server().client(client_kind)


def slots_of(client: AnyClient, count: int, **more: Any) -> tq.BatchMeta:
    """Return slots of a new partition."""
    with suppress(tq.errors.AlreadyExistsError):
        client.create_partition("train", fields=more.pop("fields", ()))
    slots: tq.BatchMeta = client.acquire("train", "rollout", count=count, **{"lease": LONG, **more})
    return slots


def rows_of(batch: Any, name: str = "tokens") -> list[list[Any]]:
    return [row.tolist() for row in batch[name].unbind()]


def test_cells_are_all_that_was_added_however_they_are_read(service_of_each_way: LiveServer, client_kind: Any) -> None:
    client = service_of_each_way.client(client_kind)
    slots = slots_of(client, 5)
    big = torch.arange(300_000)
    expected: list[list[int]] = [[] for _ in range(5)]
    meta = slots
    for step in range(4):
        added = [torch.arange(step * 100 + 3 * row, step * 100 + 4 * row) for row in range(5)]
        if step == 2:
            added[3] = big
        at = [len(row) for row in expected]
        data = {"tokens": added, "logprobs": [row.to(torch.float32) for row in added]}
        meta = client.append(meta, data, at=at)
        assert sorted(meta.data_fields) == ["logprobs", "tokens"]
        expected = [row + some.tolist() for row, some in zip(expected, added, strict=True)]
    assert rows_of(client.get_data(meta)) == expected
    found, _ = client.lookup_samples("train")
    assert rows_of(client.get_data(found), "logprobs") == expected
    for part in ([4, 0], [3], [1, 2]):
        some = client.get_data(found.select_samples(part), data_fields=["tokens"])
        assert rows_of(some) == [expected[row] for row in part]
    twice = client.get_data("train", global_indexes=[4, 0, 4], data_fields=["tokens"])
    assert rows_of(twice) == [expected[row] for row in (4, 0, 4)]
    concat = tq.BatchMeta.concat([found.select_samples([2]), found.select_samples([0, 3])])
    assert rows_of(client.get_data(concat)) == [expected[2], expected[0], expected[3]]
    client.truncate(slots, to=[0, 2, 5, 300_000, 1], data_fields=["tokens", "logprobs"])
    cut = [row[:to] for row, to in zip(expected, [0, 2, 5, 300_000, 1], strict=True)]
    assert rows_of(client.get_data("train", global_indexes=[1, 2, 3, 4], data_fields=["tokens"])) == cut[1:]
    client.append(slots, {"tokens": [[7], [8], [], [9, 9], [7]]}, at=[0, 2, 5, 300_000, 1])
    cut = [row + more for row, more in zip(cut, [[7], [8], [], [9, 9], [7]], strict=True)]
    assert client.put(slots, {"reward": torch.arange(5.0)}, ack=True).size == 5
    batch = client.get_meta(**READS, batch_size=5, max_wait=5.0)
    data = client.get_data(batch)
    assert rows_of(data) == cut
    assert data["tokens"].dtype == torch.int64
    client.clear_samples(batch)
    assert client.describe_partition("train").used_bytes == 0


def test_rows_of_several_dimensions_and_dense_data_grow(client: AnyClient) -> None:
    slots = slots_of(client, 2)
    client.append(slots, {"h": torch.zeros(2, 3, 4)}, at=[0, 0])
    meta = client.append(slots, {"h": [torch.ones(1, 4), torch.ones(0, 4)]}, at=[3, 3])
    rows = client.get_data(meta)["h"].unbind()
    assert [tuple(row.shape) for row in rows] == [(4, 4), (3, 4)]
    assert rows[0].sum() == 4
    with pytest.raises(tq.errors.FieldMismatchError, match=r"differ only in the first dimension"):
        client.append(slots, {"h": torch.zeros(2, 1, 5)}, at=[4, 3])
    with pytest.raises(tq.errors.InvalidArgumentError, match="tensor or list of numbers per sample"):
        client.append(slots, {"text": ["a", "b"]}, at=[0, 0])
    assert rows_of(client.get_data(meta), "h")[1] == [[0] * 4] * 3


def test_an_append_at_another_length_changes_nothing_and_says_which(client: AnyClient) -> None:
    slots = slots_of(client, 3)
    client.append(slots, {"tokens": [[1], [1, 2], []]}, at=[0, 0, 0])
    for at in ([1, 3, 0], [1, 1, 1]):
        with pytest.raises(
            tq.errors.PreconditionError, match="Append at the current length, or truncate the field"
        ) as raised:
            client.append(slots, {"tokens": [[9], [9], [9]]}, at=at)
        assert raised.value.reason == "LENGTH_MISMATCH"
        named = {name: raised.value.metadata[name] for name in ("global_index", "field_name", "got", "expected")}
        assert named == {"global_index": "1", "field_name": "tokens", "got": "2", "expected": str(at[1])}
    with pytest.raises(tq.errors.PreconditionError) as raised:  # one length for all fields of a call
        client.append(slots, {"tokens": [[9]] * 3, "logprobs": [[9.0]] * 3}, at=[1, 2, 0])
    assert raised.value.metadata["field_name"] == "logprobs"
    with pytest.raises(tq.errors.PreconditionError) as raised:
        client.truncate(slots, to=[0, 3, 0], data_fields=["tokens"])
    assert (raised.value.metadata["got"], raised.value.metadata["expected"]) == ("2", "3")
    found, _ = client.lookup_samples("train")
    assert found.data_fields == ["tokens"]
    assert rows_of(client.get_data(found)) == [[1], [1, 2], []]


def test_samples_that_are_not_held_or_not_leased_to_the_caller_do_not_grow(client: AnyClient) -> None:
    slots = slots_of(client, 2)
    client.append(slots, {"tokens": [[1], [2]]}, at=[0, 0])
    client.put(slots.select_samples([0]), {"reward": torch.zeros(1)}, ack=True)
    changes = {
        "append": lambda meta: client.append(meta, {"tokens": [[9]] * meta.size}, at=[1] * meta.size),
        "truncate": lambda meta: client.truncate(meta, to=[0] * meta.size, data_fields=["tokens"]),
    }
    found, _ = client.lookup_samples("train")
    plain = client.put("train", {"x": torch.zeros(1)})
    for change in changes.values():
        with pytest.raises(tq.errors.PreconditionError, match="is live; expected held") as raised:
            change(slots)
        assert (raised.value.reason, raised.value.metadata["global_index"]) == ("SAMPLE_NOT_HELD", "0")
        for meta in (found, plain):
            with pytest.raises(tq.errors.InvalidArgumentError, match="does not come from a single leased claim"):
                change(meta)
    live = client.get_meta(partition_id="train", task_name="t", data_fields=["x"], batch_size=1, lease=LONG)
    with pytest.raises(tq.errors.PreconditionError, match="is live"):
        changes["append"](live)
    client.ack(slots)
    for change in changes.values():
        with pytest.raises(tq.errors.LeaseExpiredError):
            change(slots.select_samples([1]))
    assert rows_of(client.get_data(found, data_fields=["tokens"])) == [[1], [2]]


def test_a_worker_whose_lease_ran_out_adds_nothing_and_the_next_one_continues(client: AnyClient) -> None:
    slots = slots_of(client, 1, lease=SHORT)
    client.append(slots, {"tokens": [[1, 2]]}, at=[0])
    again = client.get_meta(
        partition_id="train", task_name="rollout", data_fields=["tokens"], batch_size=1, held=True, lease=LONG,
        max_wait=20.0,
    )  # fmt: skip
    assert rows_of(client.get_data(again)) == [[1, 2]]
    for at in ([2], [3]):
        with pytest.raises(tq.errors.LeaseExpiredError):
            client.append(slots, {"tokens": [[9]]}, at=at)
        with pytest.raises(tq.errors.LeaseExpiredError):
            client.truncate(slots, to=[0], data_fields=["tokens"])
        client.append(again, {"tokens": [[3]]}, at=[2 if at == [2] else 3])
    assert rows_of(client.get_data(again)) == [[1, 2]]  # where it was when it was claimed
    found, _ = client.lookup_samples("train")
    assert rows_of(client.get_data(found)) == [[1, 2, 3, 3]]


def test_an_aborted_rollout_is_continued_or_discarded_and_no_trainer_gets_it(client: AnyClient) -> None:
    slots = slots_of(client, 2)
    client.append(slots, {"tokens": [[1] * 5, [2] * 5], "versions": [[7] * 5] * 2}, at=[0, 0])
    client.release(slots)  # what has data stays
    look = {"partition_id": "train", "task_name": "train", "data_fields": ["tokens"], "batch_size": 1}
    assert client.get_meta(**look, max_wait=0).status == "not_yet"
    again = client.get_meta(
        partition_id="train", task_name="rollout", batch_size=2, held=True, lease=LONG, data_fields=[], max_wait=5.0
    )
    assert again.global_indexes == [0, 1]
    kept, discarded = again.select_samples([0]), again.select_samples([1])
    client.truncate(discarded, to=[0], data_fields=["tokens", "versions", "never_put"])
    found, _ = client.lookup_samples("train", global_indexes=[1])
    assert found.data_fields == []
    with pytest.raises(tq.errors.CellNotFoundError):
        client.get_data(discarded, data_fields=["tokens"])
    client.append(kept, {"tokens": [[3]], "versions": [[8]]}, at=[5])
    client.append(discarded, {"tokens": [[4]], "versions": [[8]]}, at=[0])
    assert client.get_meta(**look, max_wait=0).status == "not_yet"
    client.put(again, ack=True)
    batch = client.get_meta(**look | {"batch_size": 2, "data_fields": ["tokens", "versions"]}, max_wait=5.0)
    data = client.get_data(batch)
    assert rows_of(data) == [[1] * 5 + [3], [4]]
    assert rows_of(data, "versions") == [[7] * 5 + [8], [8]]


def test_a_put_replaces_all_extents_and_write_once_fields_grow_until_they_are_put(client: AnyClient) -> None:
    slots = slots_of(client, 1, fields=[tq.FieldSpec("once", write_once=True), tq.FieldSpec("dense", layout="dense")])
    for at in range(3):
        client.append(slots, {"tokens": [[at]], "once": [[at]]}, at=[at])
    used_bytes = client.describe_partition("train").used_bytes
    client.put(slots, {"tokens": [[5]]})
    assert client.describe_partition("train").used_bytes < used_bytes
    with pytest.raises(tq.errors.AlreadyExistsError, match="write-once"):
        client.put(slots, {"once": [[5]]})
    with pytest.raises(tq.errors.FieldMismatchError, match="jagged"):
        client.append(slots, {"dense": [[5]]}, at=[0])
    client.put(slots, {"dense": torch.zeros(1, 2)})
    with pytest.raises(tq.errors.FieldMismatchError, match="differ in their first dimension"):
        client.truncate(slots, to=[0], data_fields=["dense"])
    client.append(slots, {"tokens": [[6]]}, at=[1])
    batch = client.get_data("train", global_indexes=[0], data_fields=["tokens", "once"])
    assert (rows_of(batch), rows_of(batch, "once")) == ([[5, 6]], [[0, 1, 2]])


def test_a_cell_takes_so_many_appends_and_then_one_put(client: AnyClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tq_service.machine.samples.MOST_EXTENTS", 3)
    assert extents.MOST_EXTENTS == 1024
    slots = slots_of(client, 1)
    for at in range(3):
        client.append(slots, {"tokens": [[at]]}, at=[at])
    with pytest.raises(tq.errors.PreconditionError, match="Put the entire field") as raised:
        client.append(slots, {"tokens": [[3]]}, at=[3])
    assert (raised.value.reason, raised.value.metadata["got"]) == ("TOO_MANY_EXTENTS", "3")
    meta = client.put(slots, {"tokens": client.get_data(slots, data_fields=["tokens"])["tokens"]})
    meta = client.append(meta, {"tokens": [[3]]}, at=[3])
    assert rows_of(client.get_data(meta)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"at": [0]}, "at has 1 lengths, expected 2"),
        ({"at": [0, -1]}, r"at\[1\] is -1; expected an integer"),
        ({"at": [0, 0.5]}, r"at\[1\] is 0.5"),
        ({"data": {"tokens": [[1]]}}, "metadata has 2 samples, but field 'tokens' has 1 rows"),
    ],
)
def test_arguments_that_cannot_be_meant(client: AnyClient, arguments: dict[str, Any], problem: str) -> None:
    slots = slots_of(client, 2)
    with pytest.raises(tq.errors.InvalidArgumentError, match=problem):
        client.append(slots, **{"data": {"tokens": [[1], [2]]}, "at": [0, 0]} | arguments)
    with pytest.raises(tq.errors.InvalidArgumentError, match="data_fields is empty"):
        client.truncate(slots, to=[0, 0], data_fields=[])
    assert client.append(slots.select_samples([]), {"tokens": torch.zeros(0, 1)}, at=[]).size == 0


def test_requests_that_no_client_makes_are_refused(server: LiveServer) -> None:
    client = server.client()
    slots = slots_of(client, 1)
    client.append(slots, {"tokens": [[1, 2]]}, at=[0])
    where = {"request_id": os.urandom(16), "partition_id": "train", "incarnation": slots.incarnation}
    claim = LeasedClaim(task_name="rollout", claim_request_id=slots.claim_id)
    cut = {**where, "global_indexes": [0], "lengths": [1], "data_fields": ["tokens"], "claim": claim}
    for change, field in (({"claim": None}, "claim"), ({"lengths": [-1]}, "lengths"), ({"lengths": [1, 1]}, "lengths")):
        with pytest.raises(Exception, match=field):
            server.controller.TruncateSamples(pb.TruncateSamplesRequest(**cut | change))
    assert rows_of(client.get_data(slots, data_fields=["tokens"])) == [[1, 2]]
    server.controller.TruncateSamples(pb.TruncateSamplesRequest(**cut))
    server.controller.TruncateSamples(pb.TruncateSamplesRequest(**cut))
    assert rows_of(client.get_data(slots, data_fields=["tokens"])) == [[1]]


def test_what_was_added_is_there_after_a_restart_and_in_a_checkpoint(loop_thread: LoopThread, tmp_path: Any) -> None:
    with LiveServer(loop_thread, data_dir=str(tmp_path / "data")) as server:
        client = server.client()
        slots = slots_of(client, 2)
        for at in range(3):
            client.append(slots, {"tokens": [[at, at], [at]]}, at=[2 * at, at])
        client.truncate(slots, to=[5, 3], data_fields=["tokens"])
        client.checkpoint("grown")
    expected = [[0, 0, 1, 1, 2], [0, 1, 2]]
    with LiveServer(loop_thread, data_dir=str(tmp_path / "data")) as server:
        client = server.client()
        assert rows_of(client.get_data("train", global_indexes=[0, 1])) == expected
        client.append(slots, {"tokens": [[9], [9]]}, at=[5, 3])
        client.clear_partition("train")
        client.restore("grown")
        assert rows_of(client.get_data("train", global_indexes=[0, 1])) == expected
        client.append(slots, {"tokens": [[8], [8]]}, at=[5, 3])
        found, _ = client.lookup_samples("train")
        assert rows_of(client.get_data(found)) == [[*row, 8] for row in expected]


@contextmanager
def counting(address: str) -> Iterator[tuple[str, list[int]]]:
    """Relay connections to a server; yield where, and the sizes of what clients have sent."""
    host, port = address.split(":")
    sizes: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def relay(source: socket.socket, target: socket.socket, counted: list[int]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                counted.append(len(data))
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with ExitStack() as stack, suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                for each in (near, far):
                    stack.callback(each.close)
                for ends in ((near, far, sizes), (far, near, [])):
                    threads.append(threading.Thread(target=relay, args=ends))
                    threads[-1].start()

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", sizes
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        listener.close()


def test_an_append_sends_what_is_added_and_no_more(start_server: StartServer) -> None:
    server = start_server(shared_memory="off", bulk="off")
    with counting(server.address) as (address, sizes), tq.Client(address) as client:
        client.create_partition("train")
        slots = client.acquire("train", "rollout", lease=LONG)
        before = sum(sizes)
        for step in range(32):
            client.append(slots, {"tokens": [torch.arange(256) + step]}, at=[256 * step])
        sent = sum(sizes) - before
        batch = client.get_data(slots, data_fields=["tokens"])
    values = 32 * 256 * 8
    assert values < sent < values + 32 * 1024
    assert np.array_equal(batch["tokens"].values(), torch.cat([torch.arange(256) + step for step in range(32)]))
