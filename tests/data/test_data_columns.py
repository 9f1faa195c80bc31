import numpy as np
import pytest
import torch
from fake_client import batch_of, token_rows
from hypothesis import given
from hypothesis import strategies as st
from property_settings import examples
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tq_service.client.reads import object_stack
from tq_service.data.columns import build, flatten, object_bytes, take_rows
from tq_service.schema import DTYPE_SIZES


def jagged(rows: list[torch.Tensor], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat([torch.empty(0, dtype=dtype), *rows]), offsets)


def test_flatten_and_build_keep_every_field() -> None:
    batch = batch_of(token_rows(7))
    again = build(flatten(batch))
    assert again["input_ids"].layout is torch.jagged
    assert again["logprobs"].dtype is torch.bfloat16
    assert torch.equal(again["input_ids"].values(), batch["input_ids"].values())
    assert list(again["text"]) == [f"sample {index}" for index in range(7)]
    assert again["input_ids"].offsets() is again["logprobs"].offsets()
    assert again["input_ids"].shape == again["logprobs"].shape


def test_equal_offsets_are_shared_even_where_they_were_not() -> None:
    first = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 5]))
    second = torch.nested.nested_tensor_from_jagged(torch.arange(5.0), torch.tensor([0, 2, 5]))
    other = torch.nested.nested_tensor_from_jagged(torch.arange(5.0), torch.tensor([0, 3, 5]))
    flat = flatten(TensorDict({"a": first, "b": second, "c": other}, batch_size=[2]))
    patterns = [getattr(column, "pattern", None) for column in flat.columns.values()]
    assert patterns[0] is patterns[1] is not patterns[2]
    part = take_rows(TensorDict({"a": first, "b": second, "c": other}, batch_size=[2]), [1])
    assert part["a"].offsets() is part["b"].offsets()
    assert part["c"].offsets() is not part["a"].offsets()


def test_nested_keys_and_objects_of_all_kinds_survive() -> None:
    rows = [{"image": torch.ones(2)}, None, ["a", 1]]
    batch = TensorDict({("outer", "x"): torch.arange(3), "things": NonTensorStack(*rows)}, batch_size=[3])
    part = take_rows(batch, [2, 0])
    assert part["outer", "x"].tolist() == [2, 0]
    assert part["things"][0] == ["a", 1]
    assert torch.equal(part["things"][1]["image"], torch.ones(2))


def test_rows_of_several_ragged_dimensions_are_copied_row_by_row() -> None:
    images = [torch.zeros(2, 3), torch.ones(2, 3), torch.ones(4, 1)]
    batch = TensorDict({"image": object_stack(images)}, batch_size=[3])
    part = take_rows(batch, [1, 2])
    assert [tuple(image.shape) for image in part["image"]] == [(2, 3), (4, 1)]
    part["image"][0].zero_()
    assert bool(images[1].all())


def test_ragged_dimension_other_than_the_first() -> None:
    values, offsets = torch.arange(20).reshape(2, 10), torch.tensor([0, 3, 3, 10])
    nested = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)
    for positions in ([0, 1], [2, 0], []):
        part = take_rows(TensorDict({"x": nested}, batch_size=[3]), positions)["x"]
        assert part.shape[:2] == (len(positions), 2)
        rows = part.unbind() if positions else ()
        assert all(torch.equal(row, nested.unbind()[at]) for row, at in zip(rows, positions, strict=True))


def test_gaps_between_rows_are_closed() -> None:
    nested = torch.nested.nested_tensor_from_jagged(
        torch.arange(10), torch.tensor([0, 4, 8, 10]), torch.tensor([2, 3, 1])
    )
    part = take_rows(TensorDict({"x": nested}, batch_size=[3]), [0, 1, 2])["x"]
    assert part.values().tolist() == [0, 1, 4, 5, 6, 8]
    assert part.offsets().tolist() == [0, 2, 5, 6]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(DTYPE_SIZES))
def test_every_dtype_bit_for_bit(name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.from_numpy(
        np.random.default_rng(0).integers(0, 2 if name == "bool" else 255, 6 * dtype.itemsize, np.uint8)
    )
    values = raw.view(dtype)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 4, 6]))
    batch = TensorDict({"dense": values.reshape(3, 2), "jagged": nested}, batch_size=[3])
    part = take_rows(batch, [2, 0])
    assert torch.equal(part["dense"].view(torch.uint8), torch.cat([raw.reshape(3, -1)[2:], raw.reshape(3, -1)[:1]]))
    assert torch.equal(
        part["jagged"].values().view(torch.uint8), torch.cat([raw[4 * dtype.itemsize :], raw[: dtype.itemsize]])
    )


@examples(150)
@given(st.data())
def test_slices_are_what_the_rows_are(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 4), max_size=8))
    if lengths and data.draw(st.booleans()):
        lengths = [lengths[0]] * len(lengths)
    rows = [torch.full((length,), index) for index, length in enumerate(lengths)]
    batch = TensorDict(
        {
            "ids": jagged(rows),
            "rows": torch.arange(len(rows)),
            "text": object_stack([str(at) for at in range(len(rows))]),
        },
        batch_size=[len(rows)],
    )
    positions = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10) if rows else st.just([]))
    if positions and data.draw(st.booleans()):
        positions = list(range(min(positions), max(positions) + 1))
    part = take_rows(batch, positions)
    assert part.batch_size == torch.Size([len(positions)])
    assert part["ids"].layout is torch.jagged
    assert part["ids"].dtype is torch.int64
    assert part["ids"].offsets().diff().tolist() == [lengths[at] for at in positions]
    assert part["ids"].values().tolist() == [at for at in positions for _ in range(lengths[at])]
    assert part["rows"].tolist() == positions
    assert list(part["text"]) == [str(at) for at in positions]


def test_an_empty_part_is_typed_and_can_be_padded() -> None:
    part = take_rows(batch_of(token_rows(3)), [])
    assert part.batch_size == torch.Size([0])
    assert part["input_ids"].layout is torch.jagged
    assert part["input_ids"].dtype is torch.int32
    assert part["index"].shape == (0,)
    assert list(part["text"]) == []
    assert part["input_ids"].to_padded_tensor(0).shape[0] == 0


def test_positions_outside_the_batch_are_refused() -> None:
    with pytest.raises(IndexError, match="0 to 2"):
        take_rows(batch_of(token_rows(3)), [0, 3])


def test_a_part_owns_its_memory() -> None:
    batch = batch_of(token_rows(4))
    for positions in ([0, 1, 2, 3], [3, 1]):
        part = take_rows(batch, positions)
        part["index"].fill_(-1)
        part["input_ids"].values().fill_(-1)
    assert batch["index"].tolist() == [0, 1, 2, 3]
    assert -1 not in batch["input_ids"].values().tolist()


def test_non_tensor_data_is_one_value_for_all_rows() -> None:
    data = TensorDict({"list": NonTensorData([7, 8]), "all": NonTensorData("b")}, batch_size=[3])
    part = take_rows(data, [2, 0])
    assert list(part["list"]) == [[7, 8], [7, 8]]
    assert list(part["all"]) == ["b", "b"]
    assert list(take_rows(data[:2], [0])["list"]) == data[0:1].get("list").tolist() == [[7, 8]]
    texts = TensorDict({"x": np.array(["a", "b", "c"])}, batch_size=[3])
    assert list(take_rows(texts, [2, 0])["x"]) == ["c", "a"]


def test_objects_are_counted_by_the_bytes_in_them() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (5, 3))
    rows = np.empty(2, object)
    rows[:] = [torch.zeros(3, dtype=torch.uint8), {"a": ["four"]}]
    assert object_bytes({"rows": rows, "image": (image,), "other": object(), "n": 5}) == 3 + 4 + 4 * 15
    assert flatten(TensorDict({"x": NonTensorStack(image)}, [1])).size_bytes == 60
