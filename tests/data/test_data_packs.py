"""Packs of samples as tensors, taken apart again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pack_samples import OPTIONS, TOKEN_DIMS, check_fields, check_layout, jagged, random_samples, same_bits
from property_settings import examples
from tensordict import TensorDict

from tq_service.client.reads import object_stack
from tq_service.data import PackOptions, pack_sequences, unpack_sequences
from tq_service.data.packs import padding_sequences
from tq_service.errors import InvalidArgumentError
from tq_service.schema import DTYPE_SIZES


def tokens_of(*rows: list[int], **others: Any) -> TensorDict:
    """Return a batch of token rows and further fields."""
    ids = jagged([torch.tensor(row, dtype=torch.int64) for row in rows], 0, torch.zeros(1, dtype=torch.int64))
    return TensorDict({"input_ids": ids, **others}, batch_size=[len(rows)])


@examples(60)
@given(data=st.data(), lengths=st.lists(st.integers(0, 9), max_size=8), sequence_length=st.integers(1, 12))
def test_every_value_is_found_bit_for_bit(data: st.DataObject, lengths: list[int], sequence_length: int) -> None:
    positions = data.draw(st.permutations(range(len(lengths)))) if lengths else []
    positions = positions[: data.draw(st.integers(0, len(positions)))]
    taken, align = [lengths[position] for position in positions], data.draw(st.sampled_from([1, 2, 8]))
    size = align * max(1, sum(-(-length // align) for length in taken) + data.draw(st.integers(0, 40 // align)))
    samples = random_samples(lengths, seed=len(lengths))
    options = PackOptions(pack_max_length=size, padding_sequence_length=sequence_length, align=align, **OPTIONS)
    packed = pack_sequences(samples.batch, taken, options, positions=positions)
    check_layout(packed, taken, options)
    check_fields(packed, samples, positions)
    if 0 in taken:
        with pytest.raises(ValueError, match="has no tokens"):
            unpack_sequences(packed)
        return
    rows = unpack_sequences(packed)
    assert rows.batch_size == (len(positions),)
    assert set(rows.keys()) == set(samples.rows)
    for name, column in samples.rows.items():
        got = list(rows[name].unbind()) if positions else []
        assert len(got) == len(positions)
        assert all(same_bits(row, column[position]) for row, position in zip(got, positions, strict=True)), name


def test_a_pack_written_out() -> None:
    batch = tokens_of(
        [5, 6, 7], [8], labels=jagged([torch.tensor([6, 7, -100]), torch.tensor([9])], 0, torch.arange(1))
    )
    packed = pack_sequences(batch, [3, 1], PackOptions(pack_max_length=9, pad_token_id=1, padding_sequence_length=3))
    assert packed["input_ids"].tolist() == [5, 6, 7, 8, 1, 1, 1, 1, 1]
    assert packed["labels"].tolist() == [6, 7, -100, 9, -100, -100, -100, -100, -100]
    assert packed["position_ids"].tolist() == [0, 1, 2, 0, 0, 1, 2, 0, 1]
    assert packed["cu_seqlens"].tolist() == [0, 3, 4, 7, 9]
    assert packed.max_seqlen == 3
    assert packed.num_padding == 5
    assert packed.sample_count == 2
    assert packed.token_count == 4
    assert set(packed.as_dict()) == {
        "input_ids", "labels", "position_ids", "cu_seqlens", "padding_mask", "max_seqlen", "num_padding"
    }  # fmt: skip
    assert unpack_sequences(packed)["labels"].unbind()[1].tolist() == [9]


def test_an_aligned_pack_written_out() -> None:
    batch = tokens_of(
        [5, 6, 7], [8], labels=jagged([torch.tensor([6, 7, -100]), torch.tensor([9])], 0, torch.arange(1))
    )
    options = PackOptions(pack_max_length=12, pad_token_id=1, padding_sequence_length=3, align=4)
    packed = pack_sequences(batch, [3, 1], options)
    assert packed["input_ids"].tolist() == [5, 6, 7, 1, 8, 1, 1, 1, 1, 1, 1, 1]
    assert packed["labels"].tolist() == [6, 7, -100, -100, 9, -100, -100, -100, -100, -100, -100, -100]
    assert packed["position_ids"].tolist() == [0, 1, 2, 3] * 3
    assert packed["cu_seqlens"].tolist() == [0, 4, 8, 12]
    assert [packed.token_count, packed.num_padding, packed.max_seqlen] == [4, 8, 4]
    assert [part.tolist() for part in packed.split_tokens(packed["input_ids"])] == [[5, 6, 7], [8]]
    with pytest.raises(ValueError, match="got 8 tokens in 2 samples, each rounded up to a multiple of 4; expected at"):
        pack_sequences(batch, [3, 1], PackOptions(pack_max_length=4, align=4))


def test_padding_is_laid_out_as_sequences_of_1024_by_default() -> None:
    assert padding_sequences(2500) == [1024, 1024, 452]
    assert padding_sequences(2048) == [1024, 1024]
    assert padding_sequences(0) == []
    packed = pack_sequences(tokens_of([1]), None, PackOptions(pack_max_length=4000))
    assert packed["cu_seqlens"].tolist() == [0, 1, 1025, 2049, 3073, 4000]
    assert packed.max_seqlen == 1024


def test_an_empty_pack_is_typed_like_the_others() -> None:
    options = PackOptions(pack_max_length=20, padding_sequence_length=8, **OPTIONS)
    full = pack_sequences(random_samples([4, 5]).batch, [4, 5], options)
    for batch in (random_samples([4, 5]).batch, random_samples([]).batch):
        for lengths in ([], None):
            empty = pack_sequences(batch, lengths, options, positions=[])
            check_layout(empty, [], options)
            check_fields(empty, random_samples([]), [])
            assert set(empty.tensors.keys()) == set(full.tensors.keys())
            for name, tensor in full.tensors.items():
                assert empty[name].dtype is tensor.dtype, name
                assert empty[name].ndim == tensor.ndim, name
            for name in TOKEN_DIMS:
                assert empty[name].shape == full[name].shape
            assert unpack_sequences(empty).batch_size == (0,)


@pytest.mark.parametrize(("dim", "shape"), [(0, (8, 3)), (1, (3, 8))])
def test_three_rows_of_positions_are_kept_and_restart_in_the_padding(dim: int, shape: tuple[int, int]) -> None:
    rows = [torch.arange(6).reshape(3, 2) + 50, torch.arange(3).reshape(3, 1) + 90]
    given_rows = rows if dim else [row.T.contiguous() for row in rows]
    batch = tokens_of([5, 6], [7], position_ids=jagged(given_rows, dim, given_rows[0]))
    packed = pack_sequences(batch, [2, 1], PackOptions(pack_max_length=8, padding_sequence_length=3))
    positions = packed["position_ids"]
    assert tuple(positions.shape) == shape
    expected = [[50, 51, 90, 0, 1, 2, 0, 1], [52, 53, 91, 0, 1, 2, 0, 1], [54, 55, 92, 0, 1, 2, 0, 1]]
    assert (positions if dim else positions.T).tolist() == expected
    got = unpack_sequences(packed)["position_ids"].unbind()
    assert all(torch.equal(row, expected_row) for row, expected_row in zip(got, given_rows, strict=True))


def test_long_samples_are_cut_where_asked() -> None:
    batch = tokens_of([1, 2, 3, 4, 5, 6])
    packed = pack_sequences(batch, [4], PackOptions(pack_max_length=4, overlong="truncate"))
    assert packed["input_ids"].tolist() == [1, 2, 3, 4]
    assert packed.num_padding == 0
    assert packed["cu_seqlens"].tolist() == [0, 4]
    assert unpack_sequences(packed)["input_ids"].unbind()[0].tolist() == [1, 2, 3, 4]
    assert pack_sequences(batch, None, PackOptions(pack_max_length=4, overlong="truncate")).lengths == (4,)
    with pytest.raises(ValueError, match="got length 4 for sample 0 of the pack; expected 6"):
        pack_sequences(batch, [4], PackOptions(pack_max_length=4))
    with pytest.raises(ValueError, match="got length 3 for sample 0 of the pack; expected 4"):
        pack_sequences(batch, [3], PackOptions(pack_max_length=4, overlong="truncate"))


def test_a_pack_owns_its_memory() -> None:
    batch = tokens_of([1, 2, 3], [4], score=torch.ones(2))
    packed = pack_sequences(batch, None, PackOptions(pack_max_length=3), positions=[0])
    packed["input_ids"].zero_()
    packed["score"].zero_()
    assert batch["input_ids"].values().tolist() == [1, 2, 3, 4]
    assert batch["score"].tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(DTYPE_SIZES))
def test_every_dtype_can_be_packed(name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(3 * dtype.itemsize, dtype=torch.uint8) % (2 if name == "bool" else 255)
    values = raw.view(dtype)
    batch = tokens_of([1, 2], [3], field=jagged([values[:2], values[2:]], 0, values), scalar=values[:2])
    packed = pack_sequences(batch, None, PackOptions(pack_max_length=5, repeat_fields=["scalar"]))
    expected = torch.cat([raw, torch.zeros(2 * dtype.itemsize, dtype=torch.uint8)])
    assert packed["field"].dtype is packed["scalar"].dtype is dtype
    assert torch.equal(packed["field"].view(torch.uint8), expected)
    size = dtype.itemsize
    repeated = torch.cat([raw[:size], raw[:size], raw[size : 2 * size], torch.zeros(2 * size, dtype=torch.uint8)])
    assert torch.equal(packed["scalar"].view(torch.uint8), repeated)


def test_it_moves_to_a_device_whole() -> None:
    options = PackOptions(pack_max_length=9, **OPTIONS)
    packed = pack_sequences(random_samples([3, 4]).batch, None, options)
    moved = packed.to("meta")
    assert {tensor.device.type for tensor in moved.tensors.values()} == {"meta"}
    assert moved.lengths == packed.lengths


def test_parts_of_model_outputs() -> None:
    packed = pack_sequences(tokens_of([1, 2], [], [3]), None, PackOptions(pack_max_length=5))
    assert [part.tolist() for part in packed.split_tokens(torch.arange(5.0))] == [[0, 1], [], [2]]
    assert [tuple(part.shape) for part in packed.split_tokens(torch.zeros(1, 5), dim=1)] == [(1, 2), (1, 0), (1, 1)]
    with pytest.raises(ValueError, match="got 4 values in dimension 0; expected 5"):
        packed.split_tokens(torch.arange(4))


LONG = jagged([torch.arange(3), torch.arange(1)], 0, torch.arange(1))


@pytest.mark.parametrize(
    ("fields", "options", "lengths", "message"),
    [
        ({}, {}, [2, 2], "got length 2 for sample 1 of the pack; expected 1"),
        ({}, {}, [2], "got 1 lengths; expected 2"),
        ({}, {"pack_max_length": 2}, None, "got 3 tokens in 2 samples; expected at most pack_max_length = 2"),
        ({"text": object_stack(["a", "b"])}, {}, None, "field 'text' contains objects"),
        ({"image": object_stack([torch.ones(2, 2), torch.ones(3, 1)])}, {}, None, "rows that differ in several"),
        ({"prompt": LONG}, {}, None, "field 'prompt' has 3 values in sample 0 of the pack; expected 2"),
        ({"input_ids": torch.zeros(2)}, {}, None, r"'input_ids' has rows of shape \(\); expected at least one"),
        ({"position_ids": torch.zeros(2, 4)}, {}, None, "field 'position_ids' has 4 values in sample 0 of the pack"),
        ({"mask": torch.zeros(2, 4)}, {"token_fields": ["mask"]}, None, "field 'mask' has 4 values in sample 0"),
        ({"mask": torch.zeros(2, 4, 3)}, {"token_fields": ["mask"]}, None, r"'mask' has rows of shape \(4, 3\) in"),
        ({}, {"token_fields": ["mask"]}, None, "have no field 'mask'"),
        ({"mask": torch.zeros(2)}, {"token_fields": ["mask"]}, None, r"field 'mask' has rows of shape \(\); expected"),
        ({}, {"input_field": "tokens"}, None, "have no field 'tokens', only 'input_ids'"),
        ({}, {"keep_fields": ["prompt"]}, None, "have no field 'prompt'"),
        ({"prompt": LONG}, {"repeat_fields": ["prompt"]}, None, "'prompt' in repeat_fields is jagged"),
        ({"cu_seqlens": torch.zeros(2)}, {}, None, "a field 'cu_seqlens', but packing creates this field"),
        ({"num_padding": torch.zeros(2)}, {}, None, "a field 'num_padding'"),
        ({"position_ids": LONG}, {"keep_fields": ["position_ids"]}, None, "keep_fields contains 'position_ids'"),
        ({"score": torch.zeros(2, dtype=torch.uint8)}, {"repeat_fields": ["score"], "pad_values": {"score": -1}}, None,
         "field 'score' has dtype torch.uint8 and cannot hold the padding value -1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    fields: dict[str, Any], options: dict[str, Any], lengths: list[int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack_sequences(tokens_of([1, 2], [3], **fields), lengths, PackOptions(**{"pack_max_length": 8, **options}))


# Samples that are all of one length, whose fields are dense then


def uniform(**others: Any) -> dict[str, Any]:
    """Return fields of three samples of four tokens, as a field is that was put in rows of one length."""
    numbers = torch.arange(12).reshape(3, 4)
    return {"input_ids": numbers, "labels": numbers + 1, "mask": numbers % 2 == 0, **others}


@pytest.mark.parametrize("options", [{}, {"token_fields": ("mask", "input_ids", "position_ids")}])
@pytest.mark.parametrize("positions", [[0, 1, 2], [2, 0], []])
def test_samples_of_one_length_are_packed_as_if_others_differed(options: dict[str, Any], positions: list[int]) -> None:
    places = torch.arange(4).expand(3, 3, 4) + 50
    fields = uniform(
        position_ids=places, hidden=torch.randn(3, 4, 2), image=torch.randn(3, 2, 3), embedding=torch.randn(3, 5)
    )
    dims = {"input_ids": 0, "labels": 0, "mask": 0, "hidden": 0, "position_ids": 1}
    nested = {name: jagged(list(fields[name]), dim) for name, dim in dims.items()}
    chosen = PackOptions(pack_max_length=15, **options)
    packed, expected = (
        pack_sequences(TensorDict(each, batch_size=[3]), None, chosen, positions=positions)
        for each in (fields, {**fields, **nested})
    )
    assert set(packed.tensors.keys()) == set(expected.tensors.keys())
    for name, values in expected.tensors.items():
        assert same_bits(packed[name], values), name
    assert packed.uses == expected.uses
    assert packed["image"].shape == (len(positions), 2, 3)
    if positions:
        rows = unpack_sequences(packed)
        assert all(map(torch.equal, rows["position_ids"].unbind(), places[positions]))
        assert torch.equal(rows["embedding"], fields["embedding"][positions])


def test_a_batch_without_samples_is_typed_like_others_of_one_length() -> None:
    none = TensorDict({name: values[:0] for name, values in uniform(position_ids=torch.zeros(3, 3, 4)).items()}, [0])
    packed = pack_sequences(none, None, PackOptions(pack_max_length=6, pad_token_id=9))
    assert {name: tuple(packed[name].shape) for name in ("input_ids", "labels", "mask", "position_ids")} == {
        "input_ids": (6,), "labels": (6,), "mask": (6,), "position_ids": (3, 6)
    }  # fmt: skip
    assert packed["input_ids"].tolist() == [9] * 6
    # Where only the input field is jagged, no row says how many tokens there are.
    empty = jagged([], 0, torch.zeros(1, dtype=torch.int64))
    options = PackOptions(pack_max_length=6, token_fields=("mask", "deep"))
    named = TensorDict({**dict(none.items()), "input_ids": empty, "deep": torch.zeros(0, 4, 2)}, [0])
    packed = pack_sequences(named, None, options)
    assert [tuple(packed[name].shape) for name in ("mask", "deep", "position_ids")] == [(6,), (6, 2), (3, 6)]


def test_what_may_be_per_token_or_per_sample_is_asked_for() -> None:
    """A vector of two values, in a batch whose samples all have two tokens; or a square of as many."""
    vector = tokens_of([1, 2], [3, 4], vector=torch.ones(2, 2))
    square = TensorDict(uniform(square=torch.ones(3, 4, 4)), batch_size=[3])
    for batch, name in ((vector, "vector"), (square, "square")):
        with pytest.raises(
            ValueError, match=f"field '{name}' has rows of shape .*list the field in keep_fields if its"
        ):
            pack_sequences(batch, None, PackOptions(pack_max_length=12))
        kept = pack_sequences(batch, None, PackOptions(pack_max_length=12, keep_fields=(name,)))
        assert torch.equal(kept[name], batch[name])
    packed = pack_sequences(vector, None, PackOptions(pack_max_length=6, token_fields=("vector",)))
    assert packed["vector"].tolist() == [1, 1, 1, 1, 0, 0]
    others = tokens_of([1, 2], [3], vector=torch.ones(2, 2))
    assert pack_sequences(others, None, PackOptions(pack_max_length=6))["vector"].shape == (2, 2)


def test_positions_outside_the_batch_are_refused() -> None:
    with pytest.raises(IndexError, match="got positions 0 to 2 for a batch of 2 rows"):
        pack_sequences(tokens_of([1, 2], [3]), None, PackOptions(pack_max_length=8), positions=[0, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pack_max_length": 0}, "pack_max_length: got 0"),
        ({"padding_sequence_length": 0}, "padding_sequence_length: got 0"),
        ({"align": 0}, "align: got 0"),
        ({"align": 3}, "pack_max_length: got 8; expected a multiple of align, which is 3"),
        ({"overlong": "drop"}, "overlong: got 'drop'; expected 'error' or 'truncate'"),
        ({"repeat_fields": "score"}, "repeat_fields: got 'score'; expected a list"),
        ({"repeat_fields": ["x"], "keep_fields": ["x"]}, "got 'x' twice"),
        ({"label_fields": ["input_ids"]}, "got 'input_ids' twice"),
        ({"token_fields": ["x"], "keep_fields": ["x"]}, "got 'x' twice"),
        ({"token_fields": ["x"], "repeat_fields": ["x"]}, "got 'x' twice"),
    ],
)
def test_options_that_cannot_be_right(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        PackOptions(**{"pack_max_length": 8, **options})
