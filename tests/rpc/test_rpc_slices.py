"""Parts of rows: whatever is asked of which rows, however they were put and are sent, equals a cut of whole rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import grpc
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from live_server import CLIENT_KINDS, AnyClient, LiveServer, LoopThread, StartServer
from property_settings import examples
from rpc_rows import assert_same_rows

import tq_service as tq
from tq_service.dataplane import driver
from tq_service.dataplane.bulk import server as bulk_server
from tq_service.schema import DTYPE_SIZES
from tq_service.server import storage_servicer
from tq_service.storage.index import reading
from tq_service.v1 import storage_service_pb2 as pb
from tq_service.v1.metadata_pb2 import CellRuns
from tq_service.wire import slices as wire_slices

DTYPES = sorted(name for name in DTYPE_SIZES if hasattr(torch, name) and name != "complex32")  # torch.cat warns
WAYS: Final = ("one message", "frames", "bulk", "shared memory", "files", "two storage services")
LONG: Final = 60.0


class Place:
    """A service, with a client of each kind, whose answers come one way."""

    def __init__(self, way: str, loop: LoopThread, stack: ExitStack, path: Any) -> None:
        flags: dict[str, Any] = {"shared_memory": "off", "bulk": "off"}
        if way == "bulk":
            flags["bulk"] = "on"
        if way == "shared memory":
            flags["shared_memory"] = "on"
        if way == "files":
            flags["data_dir"] = str(path)
        self.way = way
        self._count = 0
        if way == "two storage services":
            self.server = stack.enter_context(LiveServer(loop, role="controller", **flags))
            self.storages = [
                stack.enter_context(
                    LiveServer(loop, role="storage", storage_id=name, controller=self.server.address, **flags)
                )
                for name in ("one", "two")
            ]
        else:
            self.server = stack.enter_context(LiveServer(loop, **flags))
            self.storages = [self.server]
        self.clients = [self.server.client(kind) for kind in CLIENT_KINDS]
        if way == "bulk":
            for client in self.clients:
                meta = client.put(f"bulk {client.kind}", {"x": torch.zeros(4)})
                client.get_data(meta)
                while not is_bulk_up(client):
                    time.sleep(0.01)

    def read_bytes(self) -> int:
        """Return the bytes that the storage services were asked to send."""
        return sum(storage.app.storage.engine.stat().read_bytes for storage in self.storages)

    def new_partition(self) -> str:
        self._count += 1
        return f"p{self._count}"


def is_bulk_up(client: AnyClient) -> bool:
    homes = client.real._calls._channels.values()
    return any(endpoint.driver._bulk.is_up for endpoints in homes for endpoint in endpoints.values())


@contextmanager
def patched(way: str) -> Iterator[None]:
    """Have also small answers come one way."""
    with pytest.MonkeyPatch.context() as patch:
        if way != "one message":
            patch.setattr(driver, "INLINE_BYTES", -1)
        if way == "bulk":
            patch.setattr(bulk_server, "BULK_BYTES", 1)
        if way == "shared memory":
            patch.setattr(driver, "SHARED_FROM_BYTES", 1)
            patch.setattr(storage_servicer, "INLINE_BYTES", 0)
            patch.setattr(reading, "_LEAST_COLUMN_BYTES", 1)
            patch.setattr(reading, "_LEAST_MEAN_SLICE_BYTES", 0)
        yield


@pytest.fixture(scope="module", params=WAYS)
def place(
    request: pytest.FixtureRequest, loop_thread: LoopThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    with ExitStack() as stack, patched(request.param):
        yield Place(request.param, loop_thread, stack, tmp_path_factory.mktemp("data"))


def rows_of(column: Any) -> list[torch.Tensor]:
    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)


def random_rows(lengths: list[int], tail: tuple[int, ...], dtype: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    rows = []
    for length in lengths:
        shape = (length, *tail)
        high = 2 if dtype == "bool" else 256
        raw = torch.randint(0, high, (*shape, DTYPE_SIZES[dtype]), dtype=torch.uint8, generator=generator)
        rows.append(raw.reshape(-1).view(kind).reshape(shape) if raw.numel() else torch.zeros(shape, dtype=kind))
    return rows


def cut(row: torch.Tensor, ranges: Any, layers: Any = (None, None)) -> torch.Tensor:
    """Cut a whole row as Python does."""
    raw = row.view(torch.uint8) if row.dtype.itemsize == 1 else row
    parts = [raw[slice(*each)] for each in ranges]
    found = torch.cat(parts) if parts else raw[:0]
    return (found[:, slice(*layers)] if found.dim() > 1 else found).contiguous().view(row.dtype)


BOUND = st.none() | st.integers(-14, 14)
RANGE = st.tuples(BOUND, BOUND)
PROPERTY = settings(
    examples(10),
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@PROPERTY
@given(data=st.data())
def test_parts_are_those_of_whole_rows(place: Place, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6), label="rows")
    is_dense = data.draw(st.booleans(), label="dense")
    longest = data.draw(st.integers(0, 11), label="length")
    lengths = [longest] * size if is_dense else data.draw(st.lists(st.integers(0, 11), min_size=size, max_size=size))
    tail = data.draw(st.sampled_from([(), (3,), (4, 2)]), label="tail")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    rows = random_rows(lengths, tail, dtype, size + longest)
    client, partition = place.clients[data.draw(st.integers(0, 1), label="client")], place.new_partition()
    client.create_partition(partition, fields=[tq.FieldSpec("x", layout="dense" if is_dense else "jagged")])
    puts = data.draw(st.integers(1, size), label="puts")
    metas = []
    for number in range(puts):
        some = rows[number * size // puts : (number + 1) * size // puts]
        if some:
            values = torch.stack(some) if is_dense else some
            metas.append(client.put(partition, {"x": values, "y": torch.arange(len(some))}))
    order = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8), label="order")
    named: dict[str, Any] = {"target": partition, "global_indexes": order}
    if len(set(order)) == len(order):
        named = {"target": tq.BatchMeta.concat(metas).select_samples(order)}
    rows = [rows[at] for at in order]
    layers = data.draw(st.tuples(st.none() | st.integers(-5, 5), st.none() | st.integers(-5, 5)) if tail else st.none())
    more: dict[str, Any] = {} if layers is None else {"layers": layers}
    match data.draw(st.sampled_from(["all", "several", "row", "rows", "chunks"]), label="form"):
        case "all":
            given_ranges = data.draw(RANGE)
            wanted = tq.RowSlice(ranges=given_ranges, **more) if more else given_ranges
            ranges = [[given_ranges]] * len(rows)
        case "several":
            several = data.draw(st.lists(RANGE, min_size=1, max_size=3))
            wanted, ranges = tq.RowSlice(ranges=several, **more), [several] * len(rows)
        case "row":
            by_row = data.draw(st.lists(RANGE, min_size=len(rows), max_size=len(rows)))
            wanted = tq.RowSlice(by_row=by_row, **more) if more else by_row
            ranges = [[each] for each in by_row]
        case "rows":
            each_row = st.lists(RANGE, max_size=3).filter(lambda row: len(row) != 2 or row[0] is not None)
            ranges = data.draw(st.lists(each_row, min_size=len(rows), max_size=len(rows)))
            wanted = tq.RowSlice(by_row=ranges, **more)
        case _:
            count, align = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
            chunks = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3))
            wanted = tq.RowSlice(chunks=chunks, chunk_count=count, align=align, **more)
            sizes = [-(-len(row) // (count * align)) * align for row in rows]
            ranges = [[(chunk * each, (chunk + 1) * each) for chunk in chunks] for each in sizes]
    got = client.get_data(**named, slices={"x": wanted})
    expected = [cut(row, each, layers or (None, None)) for row, each in zip(rows, ranges, strict=True)]
    assert_same_rows(got["x"], expected)
    if not is_dense:
        assert got["x"].layout is torch.jagged
    elif len({len(row) for row in expected}) == 1:
        assert got["x"].layout is torch.strided
    assert len(got["y"]) == len(rows)


@PROPERTY
@given(data=st.data())
def test_parts_of_cells_that_have_grown_are_those_of_joined_cells(place: Place, data: st.DataObject) -> None:
    client, partition = place.clients[data.draw(st.integers(0, 1), label="client")], place.new_partition()
    size = data.draw(st.integers(1, 4), label="rows")
    client.create_partition(partition, fields=[tq.FieldSpec("x", layout="jagged"), tq.FieldSpec("z", layout="jagged")])
    slots = client.acquire(partition, "rollout", count=size, lease=LONG)
    tail = data.draw(st.sampled_from([(), (3,)]), label="tail")
    whole = [torch.zeros(0, *tail, dtype=torch.int32) for _ in range(size)]
    meta = slots
    for step in range(data.draw(st.integers(1, 4), label="appends")):
        lengths = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
        added = random_rows(lengths, tail, "int32", step)
        at = [len(row) for row in whole]
        meta = client.append(slots, {"x": added, "z": added}, at=at)
        whole = [torch.cat(pair) for pair in zip(whole, added, strict=True)]
        if all(map(len, whole)) and data.draw(st.booleans(), label="truncated"):
            to = [data.draw(st.integers(1, len(row))) for row in whole]
            client.truncate(slots, to=to, data_fields=["x", "z"])
            whole = [row[:length] for row, length in zip(whole, to, strict=True)]
            meta, _ = client.lookup_samples(partition)
    by_row = data.draw(st.lists(RANGE, min_size=size, max_size=size))
    several = data.draw(st.lists(RANGE, min_size=1, max_size=3))
    layers = data.draw(st.tuples(st.integers(-3, 3), st.none()) if tail else st.none())
    for wanted, ranges in (
        (tq.RowSlice(by_row=by_row, layers=layers), [[each] for each in by_row]),
        (tq.RowSlice(ranges=several, layers=layers), [several] * size),
    ):
        got = client.get_data(meta, data_fields=["x", "z"], slices={"x": wanted})
        expected = [cut(row, each, layers or (None, None)) for row, each in zip(whole, ranges, strict=True)]
        assert_same_rows(got["x"], expected)
        assert_same_rows(got["z"], whole)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_group_fetches_each_row_once(place: Place, layout: Any) -> None:
    lengths = [4096, 1000, 4093, 8, 1, 0, 2048]
    rows = random_rows(lengths, (), "int64", 1)
    experts = random_rows(lengths, (4, 2), "uint8", 2)
    client, partition = place.clients[0], place.new_partition()
    meta = client.put(partition, {"x": rows, "e": experts})
    before = place.read_bytes()
    whole = client.get_data(meta)
    whole_bytes = place.read_bytes() - before
    padded = [8 * -(-length // 8) for length in lengths]
    got = [torch.full((length,), -1) for length in padded]
    for rank in range(4):
        share = tq.RowSlice.share(rank, 4, layout, fill=0, positions="at")
        before = place.read_bytes()
        part = client.get_data(meta, slices={"x": share, "e": share})
        assert place.read_bytes() - before <= whole_bytes / 4 * 1.02 + 64 * len(rows)
        shares = zip(part["at"].unbind(), part["x"].unbind(), part["e"].unbind(), strict=True)
        for row, (at, values, expert) in enumerate(shares):
            multiple = 8 if layout == "zigzag" else 4
            assert len(at) == len(values) == len(expert) == -(-lengths[row] // multiple) * multiple // 4
            within = at < lengths[row]
            assert torch.equal(expert[within], experts[row][at[within]])
            assert not expert[~within].any()
            got[row][at[within]] = values[within]
    for row, length in enumerate(lengths):
        assert torch.equal(got[row][:length], whole["x"].unbind()[row])


def test_the_same_sample_twice_is_cut_twice(place: Place) -> None:
    client, partition = place.clients[1], place.new_partition()
    client.put(partition, {"x": [torch.arange(9), torch.arange(5)]}, keys=["a", "b"])
    named = {"target": partition, "keys": ["a", "b", "a"], "data_fields": ["x"]}
    by_row = np.array([[0, 2], [-2, 99], [4, 6]])
    assert [row.tolist() for row in client.get_data(**named, slices={"x": by_row})["x"].unbind()] == [
        [0, 1],
        [3, 4],
        [4, 5],
    ]
    alike = client.get_data(**named, slices={"x": (-2, None)})["x"]
    assert [row.tolist() for row in alike.unbind()] == [[7, 8], [3, 4], [7, 8]]


@pytest.fixture
def client(start_server: StartServer, client_kind: Any) -> AnyClient:
    return start_server().client(client_kind)


def test_no_rows_have_the_shape_of_parts(client: AnyClient) -> None:
    fields = [tq.FieldSpec("x", "int64", "jagged", (-1,)), tq.FieldSpec("d", "int8", "dense", (8, 4))]
    client.create_partition("p", fields=fields)
    meta = client.put("p", {"x": [torch.arange(3)], "d": torch.zeros(1, 8, 4, dtype=torch.int8)})
    share = tq.RowSlice.share(1, 2, fill=0, positions="at")
    slices = {"x": share, "d": tq.RowSlice(ranges=(2, 4), layers=(0, 3))}
    none = client.get_data(meta.select_samples([]), slices=slices)
    assert tuple(none["d"].shape) == (0, 2, 3)
    assert none["x"].layout is none["at"].layout is torch.jagged
    by_row = client.get_data(meta.select_samples([]), slices={"d": []})
    assert tuple(by_row["d"].shape) == (0, 0, 4)


def test_parts_of_a_declared_field_are_jagged_where_they_are_alike(client: AnyClient) -> None:
    client.create_partition("p", fields=[tq.FieldSpec("x", layout="jagged")])
    meta = client.put("p", {"x": [torch.arange(6).reshape(3, 2)]})
    for wanted in ([(0, 1)], (0, 1), [(2, 1)], tq.RowSlice.share(0, 2)):
        assert client.get_data(meta, slices={"x": wanted})["x"].layout is torch.jagged


def test_out_takes_parts_of_dense_rows(client: AnyClient) -> None:
    meta = client.put("p", {"d": torch.arange(24).reshape(3, 8)})
    out = {"d": torch.zeros(3, 3, dtype=torch.int64)}
    assert client.get_data(meta, slices={"d": (2, 5)}, out=out)["d"] is not None
    assert out["d"].tolist() == [[2, 3, 4], [10, 11, 12], [18, 19, 20]]


WRONG: Final[dict[str, tuple[Any, str]]] = {
    "not fetched": ({"y": (0, 1)}, "'y', which is not fetched; expected any of"),
    "objects": ({"o": (0, 1)}, "objects cannot be sliced"),
    "single values": ({"s": (0, 1)}, "scalar rows cannot be sliced"),
    "no mapping": ([("x", (0, 1))], "type list; expected a mapping"),
    "no range": ({"x": 5}, "5 for field 'x'; expected (start, stop)"),
    "not integers": ({"x": (0.5, 2)}, "0.5 for a row of field 'x'; expected (start, stop), or a list of such pairs"),
    "rows": ({"x": [(0, 1)]}, "ranges of 1 rows for field 'x'; expected one for each of 2 rows"),
    "array": (
        {"x": np.zeros((2, 3), np.int64)},
        "an array of int64 with shape [2, 3] for field 'x'; expected an integer array",
    ),
    "step": ({"x": slice(0, 4, 2)}, "a step of 2 for field 'x'; expected no step"),
    "second": ({"x": tq.RowSlice(layers=(0, 1))}, "a slice of the second dimension requires the same size"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_slices_that_cannot_be_are_refused(client: AnyClient, wrong: str) -> None:
    data = {"x": [torch.arange(3), torch.arange(4)], "o": ["a", "b"], "s": torch.zeros(2)}
    meta = client.put("p", data)
    slices, says = WRONG[wrong]
    with pytest.raises(tq.errors.InvalidArgumentError) as caught:
        client.get_data(meta, slices=slices)
    assert says in str(caught.value)
    assert caught.value.field == "slices"


def test_shares_that_cannot_be_are_refused() -> None:
    for wrong, says in (
        (lambda: tq.RowSlice.share(4, 4), "cp_rank 4 of 4"),
        (lambda: tq.RowSlice.share(0, 4, "spiral"), "'contiguous' or 'zigzag'"),  # type: ignore[arg-type]
        (lambda: tq.RowSlice(ranges=(0, 1), chunks=[0], chunk_count=1), "more than one of ranges"),
        (lambda: tq.RowSlice(chunks=[2], chunk_count=2), "chunks [2] of 2"),
        (lambda: tq.RowSlice(fill=0), "fill without chunks"),
        (lambda: tq.RowSlice.share(0, 2, align=0), "align 0"),
    ):
        with pytest.raises(tq.errors.InvalidArgumentError) as caught:
            wrong()
        assert says in str(caught.value)


def test_ranges_by_row_and_missing_samples_do_not_go_together(client: AnyClient) -> None:
    client.put("p", {"x": [torch.arange(3)]}, keys=["a"])
    with pytest.raises(tq.errors.InvalidArgumentError, match="skipping samples would shift the ranges"):
        client.get_data("p", keys=["a", "b"], missing="skip", slices={"x": [(0, 1), (0, 1)]})
    some = client.get_data("p", keys=["a", "b"], data_fields=["x"], missing="skip", slices={"x": (1, 2)})
    assert [row.tolist() for row in some["x"].unbind()] == [[1]]


def test_positions_of_rows_of_other_lengths_are_not_one_column(client: AnyClient) -> None:
    meta = client.put("p", {"x": [torch.arange(8)], "y": [torch.arange(4)]})
    share = tq.RowSlice.share(0, 2, positions="at")
    with pytest.raises(tq.errors.FieldMismatchError, match=r"'x' and 'y' share column .* different positions"):
        client.get_data(meta, slices={"x": share, "y": share})


# What a client in another language may send


@pytest.fixture
def stored(server: LiveServer) -> pb.GetRequest:
    client = server.client()
    rows = [torch.zeros(length, 4, 2, dtype=torch.uint8) for length in (5, 3)]
    client.put("p", {"x": rows, "o": ["a", "b"], "s": torch.zeros(2)}, keys=["a", "b"])
    (put,) = client.lookup_samples("p", ["a", "b"])[0].locations.puts
    runs = [CellRuns(field_names=["x", "o", "s"], put_indexes=[0], first_rows=[0], row_counts=[2])]
    return pb.GetRequest(boot_id=put.storage.boot_id, put_ids=[put.put_id], runs=runs)


WRONG_MESSAGES: Final[dict[str, tuple[pb.RowSlice, str]]] = {
    "unknown field": (pb.RowSlice(field_names=["z"]), "field 'z' has a slice but is not read"),
    "twice": (pb.RowSlice(field_names=["x", "x"]), "field 'x' has two slices"),
    "stops": (pb.RowSlice(field_names=["x"], starts=[0, 1], stops=[1]), "2 starts and 1 stops"),
    "both": (pb.RowSlice(field_names=["x"], starts=[0], stops=[1], chunks=[0], chunk_count=1), "ranges and chunks"),
    "no chunk": (pb.RowSlice(field_names=["x"], chunk_count=2), "chunks [] of 2"),
    "chunk": (pb.RowSlice(field_names=["x"], chunks=[2], chunk_count=2), "chunks [2] of 2"),
    "count": (pb.RowSlice(field_names=["x"], chunks=[0], chunk_count=2**31), "of 2147483648"),
    "rows": (pb.RowSlice(field_names=["x"], starts=[0], stops=[1], range_counts=[1]), "range_counts for 1 rows"),
    "sum": (pb.RowSlice(field_names=["x"], starts=[0], stops=[1], range_counts=[1, 1]), "with a sum of 2"),
    "objects": (pb.RowSlice(field_names=["o"], starts=[0], stops=[1]), "objects cannot be sliced"),
    "single values": (pb.RowSlice(field_names=["s"], starts=[0], stops=[1]), "its rows are single values"),
    "second": (pb.RowSlice(field_names=["s"], second=pb.IndexRange(start=0, stop=1)), "single values"),
}


@pytest.mark.parametrize("wrong", WRONG_MESSAGES)
def test_slices_of_other_clients_are_checked(server: LiveServer, stored: pb.GetRequest, wrong: str) -> None:
    message, says = WRONG_MESSAGES[wrong]
    stored.slices.append(message)
    for call in (
        lambda: list(server.storage.Get(stored)),
        lambda: server.storage.GetInline(pb.GetInlineRequest(get=stored)),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert says in caught.value.details()
    del stored.slices[:]
    assert server.storage.GetInline(pb.GetInlineRequest(get=stored)).header.row_count == 2


def test_pieces_are_bounded(server: LiveServer, stored: pb.GetRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_slices, "MOST_PIECES", 7)
    for message in (
        pb.RowSlice(field_names=["x"], second=pb.IndexRange(start=0, stop=1)),
        pb.RowSlice(field_names=["x"], starts=[0] * 4, stops=[1] * 4),
    ):
        del stored.slices[:]
        stored.slices.append(message)
        with pytest.raises(grpc.RpcError) as caught:
            server.storage.GetInline(pb.GetInlineRequest(get=stored))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "expected at most 7" in caught.value.details()


def test_extents_that_do_not_agree_are_refused(server: LiveServer, stored: pb.GetRequest) -> None:
    (runs,) = stored.runs
    stored.joins_extents = True
    for counts, lengths in (([1], [1]), ([3], [1, 1]), ([0, 2], [1, 1]), ([2], [1])):
        del runs.extent_counts[:], runs.extent_lengths[:]
        runs.extent_counts.extend(counts)
        runs.extent_lengths.extend(lengths)
        with pytest.raises(grpc.RpcError) as caught:
            server.storage.GetInline(pb.GetInlineRequest(get=stored))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "extent_counts" in caught.value.details()
    stored.joins_extents = False  # of a client that joins extents itself
    assert server.storage.GetInline(pb.GetInlineRequest(get=stored)).header.row_count == 2
