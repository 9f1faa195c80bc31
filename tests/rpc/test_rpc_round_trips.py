"""What was put comes back bit for bit through a real server, in the same layout, dtype, shape and order."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from live_server import AnyClient, LiveServer
from padded_rows import LENGTHS, assert_pads_like, columns_of
from rpc_rows import assert_same_rows, bits, every_way, rows_of, ways  # noqa: F401  (a fixture)

import tq_service as tq
from tq_service.schema import DTYPE_SIZES

DTYPES = sorted(name for name in DTYPE_SIZES if hasattr(torch, name))


def random_rows(dtype: str, *shape: int) -> torch.Tensor:
    """Return a tensor of random bits, so of NaNs and denormals too."""
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, DTYPE_SIZES[dtype]), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape)


@every_way
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_in_both_layouts(client: AnyClient) -> None:
    dense = {f"dense_{name}": random_rows(name, 5, 3) for name in DTYPES}
    jagged = {f"jagged_{name}": [random_rows(name, length) for length in (4, 0, 7, 1, 2)] for name in DTYPES}
    meta = client.put("dtypes", {**dense, **jagged})
    order = [3, 0, 4, 1, 2]
    batch = client.get_data(meta.select_samples(order))
    for name, values in {**dense, **jagged}.items():
        assert_same_rows(batch[name], [values[position] for position in order])
        assert (batch[name].layout is torch.jagged) == name.startswith("jagged")
    assert {len(DTYPES)} == {len(dense), len(jagged)}
    assert {"bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "uint64", "bool"} <= set(DTYPES)


DENSE = {
    "scalars": torch.arange(6),
    "rows": torch.randn(6, 5),
    "n-d rows": torch.randn(6, 2, 3, 4),
    "rows without elements": torch.zeros(6, 0, 3),
    "not contiguous": torch.randn(5, 6).t(),
    "expanded": torch.randn(1, 4).expand(6, 4),
    "numpy": np.arange(12, dtype=np.float32).reshape(6, 2),
    "list of ints": [1, 2, 3, 4, 5, 2**62],
    "list of bools": [True, False] * 3,
    "list of floats": [0.1, float("inf"), -0.0, 1e-320, 5.0, 1e300],
    "list of scalars": [torch.tensor(float(value)) for value in range(6)],
}


@every_way
@pytest.mark.parametrize("name", DENSE)
def test_dense_columns(client: AnyClient, name: str) -> None:
    values = DENSE[name]
    meta = client.put("dense", {"x": values})
    expected = torch.stack(values) if name == "list of scalars" else torch.as_tensor(values)
    if name == "list of floats":
        expected = torch.tensor(values, dtype=torch.float64)
    got = client.get_data(meta)["x"]
    assert bits(got) == bits(expected)
    picked = [5, 1, 1 + 1, 0]
    assert bits(client.get_data(meta.select_samples(picked))["x"]) == bits(expected[picked])


@every_way
@pytest.mark.parametrize("name", LENGTHS)
def test_jagged_columns_are_padded_to_their_longest_row(client: AnyClient, name: str) -> None:
    lengths = LENGTHS[name]
    data = columns_of(lengths)
    meta = client.put("padded", data)
    more = columns_of([13, 2], first=100)
    both = tq.BatchMeta.concat([client.put("padded", more), meta])
    everything = list(range(len(lengths)))
    for positions in (everything, everything[::-1], everything[-1:]):
        batch = client.get_data(meta.select_samples(positions))
        for field, values in data.items():
            assert_pads_like(batch[field], [values.unbind()[position] for position in positions])
            assert batch[field].offsets() is batch["tokens"].offsets()
    batch = client.get_data(both)
    for field, values in data.items():
        assert_pads_like(batch[field], [*more[field].unbind(), *values.unbind()])
    nothing = client.get_data(meta.select_samples([]))
    assert {field: tuple(nothing[field].to_padded_tensor(0).shape) for field in data} == {
        "tokens": (0, 0), "features": (0, 0, 2), "position_ids": (0, 3, 0), "deep": (0, 3, 0, 2),
    }  # fmt: skip


ROWS = {
    "lengths differ": [torch.arange(length) for length in (3, 1, 9, 2)],
    "lengths equal": [torch.randn(4) for _ in range(4)],
    "zero-length rows": [torch.randn(length) for length in (0, 3, 0, 0)],
    "only zero-length rows": [torch.zeros(0) for _ in range(4)],
    "sizes very different": [torch.randn(length) for length in (1, 700_000, 0, 13)],
    "first of two dims ragged": [torch.randn(length, 3) for length in (3, 1, 0, 2)],
    "second of two dims ragged": [torch.randn(3, length) for length in (3, 1, 0, 2)],
    "two dims ragged": [torch.randn(a, 2, b) for a, b in ((3, 1), (0, 5), (2, 2), (1, 0))],
    "nested": torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(5, 3)] * 2, layout=torch.jagged),
}


@every_way
@pytest.mark.parametrize("name", ROWS)
def test_columns_of_rows(client: AnyClient, name: str) -> None:
    values = ROWS[name]
    meta = client.put("rows", {"x": values})
    got = client.get_data(meta)["x"]
    assert_same_rows(got, values)
    assert isinstance(got, torch.Tensor) == (name != "two dims ragged")
    are_alike = name in ("lengths equal", "only zero-length rows")
    assert not isinstance(got, torch.Tensor) or (got.layout is torch.jagged) != are_alike
    assert_same_rows(client.get_data(meta.select_samples([3, 1]))["x"], [rows_of(values)[3], rows_of(values)[1]])


@every_way
def test_objects(client: AnyClient) -> None:
    values: list[Any] = [
        "text",
        b"\x00bytes",
        None,
        {"messages": [{"role": "user", "content": "Grüße"}], "turns": (1, 2.5), 7: True},
        [2**80, -(2**70), 1e-300, float("inf")],
        {"image": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "mask": np.array([[True], [False]])},
        np.float32(0.1),
        "",
    ]
    meta = client.put("objects", {"o": values})
    got = client.get_data(meta.select_samples(range(7, -1, -1)))["o"]
    back = list(got)[::-1]
    assert back[:5] == values[:5]
    assert isinstance(back[3]["turns"], tuple)
    assert bits(back[5]["image"]) == bits(values[5]["image"])
    assert np.asarray(back[5]["mask"]).tolist() == [[True], [False]]
    assert back[6] == values[6]
    assert back[7] == ""


def test_fields_with_one_pattern_share_their_offsets(client: AnyClient) -> None:
    rows = [torch.randn(length) for length in (3, 1, 4)]
    meta = client.put("offsets", {"a": rows, "b": [row * 2 for row in rows], "c": rows[::-1]})
    batch = client.get_data(meta)
    assert batch["a"].offsets() is batch["b"].offsets()
    assert (batch["a"] * batch["b"]).unbind()[2].shape == (4,)


def test_dense_rows_in_a_field_declared_jagged_come_back_jagged(client: AnyClient) -> None:
    client.create_partition("declared", fields=[tq.FieldSpec("x", dtype="int64", layout="jagged")])
    meta = client.put("declared", {"x": torch.arange(8).reshape(2, 4)})
    got = client.get_data(meta)["x"]
    assert got.layout is torch.jagged
    assert_same_rows(got, torch.arange(8).reshape(2, 4))
    by_index = client.get_data("declared", global_indexes=[1, 0])["x"]
    assert by_index.layout is torch.jagged
    assert_same_rows(by_index, torch.arange(8).reshape(2, 4).flip(0))


def test_dense_rows_in_a_partition_of_jagged_layout_come_back_jagged(client: AnyClient) -> None:
    client.create_partition("declared", default_layout="jagged")
    meta = client.put("declared", {"x": torch.zeros(3, 2), "text": ["a", "b", "c"]})
    assert client.get_data(meta)["x"].layout is torch.jagged


def test_mixed_puts_of_a_jagged_field(client: AnyClient) -> None:
    client.create_partition("mixed", fields=[tq.FieldSpec("x", layout="jagged")])
    parts: list[Any] = [
        [torch.randn(2, 3), torch.randn(5, 3)],
        torch.randn(2, 4, 3),
        [torch.randn(4, 7), torch.randn(4, 1)],
        torch.randn(1, 0, 3),
    ]
    for part in parts:
        client.put("mixed", {"x": part})
    expected = [row for part in parts for row in rows_of(part)]
    order = [6, 2, 0, 5, 3, 1, 4]
    got = client.get_data("mixed", global_indexes=order)["x"]
    assert_same_rows(got, [expected[index] for index in order])
    (field,) = client.describe_partition("mixed").fields
    assert field.spec.row_shape == (-1, -1)
    claimed = client.get_meta(partition_id="mixed", task_name="t", data_fields=["x"], batch_size=7)
    assert_same_rows(client.get_data(claimed)["x"], expected)
    assert_same_rows(client.get_data(claimed.select_samples([2, 3]))["x"], expected[2:4])


def test_columns_of_several_puts_make_one_batch(client: AnyClient) -> None:
    meta = client.put("columns", {"a": torch.arange(6)})
    client.put(meta.select_samples([5, 3, 1]), {"b": torch.arange(3) * 10})
    client.put(meta.select_samples([0, 2, 4]), {"b": torch.arange(3) * 100})
    batch = client.get_data("columns", global_indexes=range(6))
    assert batch["a"].tolist() == list(range(6))
    assert batch["b"].tolist() == [0, 20, 100, 10, 200, 0]
    assert client.get_data(meta, data_fields=["b"])["b"].tolist() == [0, 20, 100, 10, 200, 0]


def test_tensordicts_go_in_and_out(client: AnyClient) -> None:
    from tensordict import TensorDict

    data = TensorDict({"a": torch.arange(3), "n": torch.randn(3, 2)}, batch_size=[3])
    meta = client.put("tensordict", data)
    batch = client.get_data(meta)
    assert isinstance(batch, TensorDict)
    assert batch.batch_size == (3,)
    assert bits(batch["n"]) == bits(data["n"])
    again = client.put("again", batch)
    assert bits(client.get_data(again)["n"]) == bits(data["n"])


def test_a_column_of_many_frames(client: AnyClient) -> None:
    large = torch.randint(-(2**62), 2**62, (3, 900_001))
    meta = client.put("frames", {"large": large, "after": torch.arange(3)})
    batch = client.get_data(meta.select_samples([2, 0]))
    assert bits(batch["large"]) == bits(large[[2, 0]])
    assert batch["after"].tolist() == [2, 0]


def test_an_overwrite_is_a_swap_for_those_who_read(server: LiveServer, client: AnyClient) -> None:
    """Readers see one version of each row of a put, never a mix of two; consumption stays as it is."""
    width = 40_000
    meta = client.put("swap", {"x": torch.zeros(4, width, dtype=torch.int64)})
    claimed = client.get_meta(partition_id="swap", task_name="t", data_fields=["x"], batch_size=4)
    writer = server.client("sync")
    stop = threading.Event()

    def write() -> int:
        version = 0
        while not stop.is_set():
            version += 1
            writer.put(meta, {"x": torch.full((4, width), version, dtype=torch.int64)})
        return version

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            seen = set()
            while len(seen) < 5:
                for batch in (claimed, meta):
                    got = client.get_data(batch)["x"]
                    versions = got.unique().tolist()
                    assert len(versions) == 1
                    seen.update(versions)
        finally:
            stop.set()
        last = writing.result()
    assert client.get_data(claimed)["x"].unique().tolist() == [last]
    assert client.storage_stat().used_bytes == 4 * width * 8
    assert client.storage_stat().put_count == 1
    assert client.check_consumption("swap", "t").consumed_count == 4


def test_rows_put_one_by_one_keep_the_declared_ragged_dimension(client: AnyClient) -> None:
    """Three rows of position ids a sample, as vision-language models have: every put alone is of one size."""
    client.create_partition("train", fields=[tq.FieldSpec("position_ids", layout="jagged", row_shape=(3, -1))])
    rows = [torch.arange(3 * length).reshape(3, length) for length in (4, 2, 7)]
    metas = [client.put("train", {"position_ids": [row]}) for row in rows]
    field = client.describe_partition("train").fields[0]
    assert field.spec.row_shape == (3, -1)
    batch = client.get_data(tq.BatchMeta.concat(metas))
    assert batch["position_ids"].is_nested
    assert batch["position_ids"].layout is torch.jagged
    for got, row in zip(batch["position_ids"].unbind(), rows, strict=True):
        assert torch.equal(got, row)
    alone = client.get_data(metas[1])
    assert alone["position_ids"].layout is torch.jagged
    assert torch.equal(alone["position_ids"].unbind()[0], rows[1])
