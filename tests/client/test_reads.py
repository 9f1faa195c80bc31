"""Reads over several storage services: any layout, any spread of the samples, comes back in the order of the batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tq_service.client.batch_meta import CellLocations, PutRef, StorageRef
from tq_service.client.reads import StorageRead, decode_columns, empty_columns, merge_answers, plan_reads
from tq_service.errors import FieldMismatchError
from tq_service.schema import FieldSpec, Layout
from tq_service.v1.storage_service_pb2 import GetRequest
from tq_service.wire.columns import ColumnShape
from tq_service.wire.encoding import encode_columns
from tq_service.wire.metadata import CellRuns

STORAGES = [StorageRef(f"s{number}", bytes([number]) * 16, f"host:{number}") for number in range(3)]


def column_bytes(column):
    return np.frombuffer(b"".join(column.chunks), np.uint8).copy()


def serve(read, puts):
    """Answer a read as a storage service would, from puts given as data."""
    answer = []
    for runs in read.request.runs:
        rows = [
            (read.request.put_ids[put], row)
            for put, first, count in zip(runs.put_indexes, runs.first_rows, runs.row_counts, strict=True)
            for row in range(first, first + count)
        ]
        for name in runs.field_names:
            (column,) = encode_columns({name: [puts[put_id][name][row] for put_id, row in rows]})
            answer.append((column, column_bytes(column)))
    return answer


@settings(deadline=None)
@given(st.data())
def test_rows_come_back_in_order(data):
    size = data.draw(st.integers(1, 12), label="samples")
    values = {
        "dense": [torch.tensor(i) for i in range(size)],
        "jagged": [torch.arange(data.draw(st.integers(0, 4))) + i for i in range(size)],
        "grid": [torch.full((1 + i % 2, 2 + i % 3), i) for i in range(size)],
        "text": [f"{i}" * (i % 3) for i in range(size)],
    }
    puts = {f"put {number}".encode(): {name: [] for name in values} for number in range(3)}
    runs = []
    for names in (("dense", "jagged"), ("grid",), ("text",)):
        owners = np.array(data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size), label=str(names)))
        rows = []
        for at, owner in enumerate(owners.tolist()):
            held = puts[f"put {owner}".encode()]
            rows.append(len(held[names[0]]))
            for name in names:
                held[name].append(values[name][at])
        runs.append(CellRuns.of_rows(names, owners, np.array(rows)))
    locations = CellLocations(
        puts=tuple(PutRef(STORAGES[number], f"put {number}".encode()) for number in range(3)), runs=tuple(runs)
    )
    reads = plan_reads(locations, list(values))
    received = merge_answers(reads, [serve(read, puts) for read in reads], list(values), {}, CellLocations())
    back = decode_columns([column for column, _ in received], [buffer for _, buffer in received], as_torch=False)
    assert back["dense"].tolist() == list(range(size))
    for name in ("jagged", "grid"):
        assert [row.tolist() for row in back[name]] == [row.tolist() for row in values[name]]
    assert back["text"] == values["text"]


def test_fields_of_one_storage_and_the_same_samples_take_one_read():
    def runs(*names):
        return CellRuns.of_rows(names, np.zeros(3, np.int64), np.arange(3))

    locations = CellLocations(puts=(PutRef(STORAGES[0], b"p"),), runs=(runs("a", "b"), runs("c"), runs("d")))
    (read,) = plan_reads(locations, ["a", "c"])
    assert [list(part.field_names) for part in read.request.runs] == [["a"], ["c"]]
    assert read.storage is STORAGES[0]


@pytest.mark.parametrize(
    "declared", [{}, {"x": FieldSpec("x", dtype="float32", layout=Layout.JAGGED, row_shape=(-1,))}]
)
def test_a_dense_part_of_a_jagged_field_comes_back_jagged(declared):
    locations = CellLocations(
        puts=tuple(PutRef(storage, b"p") for storage in STORAGES[:2]),
        runs=(CellRuns.of_rows(("x",), np.array([0, 1, 0]), np.array([0, 0, 1])),),
    )
    reads = plan_reads(locations, ["x"])
    answers = []
    for rows in (torch.tensor([[1.0, 2.0], [4.0, 5.0]]), [torch.tensor([3.0])]):
        (column,) = encode_columns({"x": rows})
        answers.append([(column, column_bytes(column))])
    ((column, buffer),) = merge_answers(reads, answers, ["x"], declared, locations)
    assert column.spec.layout is Layout.JAGGED
    rows = decode_columns([column], [buffer], as_torch=False)["x"]
    assert [row.tolist() for row in rows] == [[1, 2], [3], [4, 5]]


def test_storages_that_hold_different_kinds_of_a_field_are_an_error():
    locations = CellLocations(
        puts=tuple(PutRef(storage, b"p") for storage in STORAGES[:2]),
        runs=(CellRuns.of_rows(("x",), np.array([0, 1]), np.array([0, 0])),),
    )
    reads = plan_reads(locations, ["x"])
    answers = []
    for dtype in (torch.int64, torch.float32):
        (column,) = encode_columns({"x": torch.zeros(1, dtype=dtype)})
        answers.append([(column, column_bytes(column))])
    with pytest.raises(FieldMismatchError, match=r"int64.*float32"):
        merge_answers(reads, answers, ["x"], {}, CellLocations())


@pytest.mark.parametrize(
    "spec",
    [
        FieldSpec("x", dtype="bfloat16", layout=Layout.DENSE, row_shape=(3,)),
        FieldSpec("x", dtype="int64", layout=Layout.JAGGED, row_shape=(-1, 2)),
        FieldSpec("x", dtype="int64", layout=Layout.JAGGED, row_shape=(-1, -1)),
        FieldSpec("x", layout=Layout.OBJECT, row_shape=()),
        FieldSpec("x", dtype="int64", layout=Layout.JAGGED),
        FieldSpec("x"),
    ],
)
def test_empty_columns_are_typed(spec):
    received = empty_columns([spec])
    (column, buffer) = received[0]
    assert isinstance(column, ColumnShape)
    value = decode_columns([column], [buffer])["x"]
    assert len(value) == 0
    if spec.layout is Layout.DENSE:
        assert (value.dtype, value.shape) == (torch.bfloat16, (0, 3))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128])
@pytest.mark.parametrize("lengths", [(0, 3), (40, 400), (0, 3, 5000)])
def test_short_and_long_rows_of_two_storages_are_put_in_order(dtype, lengths):
    rng = np.random.default_rng(0)
    rows = [torch.arange(int(rng.choice(lengths)), dtype=torch.int64).to(dtype) + i % 3 for i in range(200)]
    owners = rng.integers(0, 2, len(rows))
    reads, answers = [], []
    for number in range(2):
        positions = np.flatnonzero(owners == number)
        values = {"rows": [rows[at] for at in positions], "fixed": torch.stack([rows[at].sum() for at in positions])}
        columns = encode_columns(values)
        reads.append(StorageRead(storage=STORAGES[number], positions=positions, request=GetRequest()))
        answers.append([(column, column_bytes(column)) for column in columns])
    merged = merge_answers(reads, answers, ["rows", "fixed"], {}, CellLocations())
    back = decode_columns([column for column, _ in merged], [values for _, values in merged])
    for got, row in zip(back["rows"].unbind(), rows, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, row)
    assert torch.equal(back["fixed"], torch.stack([row.sum() for row in rows]))
