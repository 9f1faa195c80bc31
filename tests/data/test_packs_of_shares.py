"""Packs of the ranks of a context-parallel group, beside the packs of whole rows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from live_server import LiveServer
from pack_samples import OPTIONS, TOKEN_DIMS, batch_of, random_samples, same_bits
from property_settings import examples

import tq_service as tq
from tq_service.data import (
    PackedMicroBatch,
    PackedSequences,
    PackOptions,
    StreamingDataLoader,
    StreamingDataset,
    pack_sequences,
    unpack_sequences,
)

FIELDS = ["index", "input_ids", "labels", "advantage"]
LENGTHS = [5, 16, 1, 9, 30, 2, 3, 8, 7, 11, 4, 20]


def places_of(lengths: list[int], share: tq.RowSlice) -> list[list[int]]:
    """Return which tokens of each of some sequences a rank has, as Transformer Engine cuts what is packed."""
    sizes = [length // share.chunk_count for length in lengths]
    return [[chunk * size + at for chunk in share.chunks for at in range(size)] for size in sizes]


def share_of(row: torch.Tensor, dim: int, share: tq.RowSlice) -> torch.Tensor:
    """Return the share of a row, filled with zeros."""
    length, multiple = row.shape[dim], share.chunk_count * share.align
    shape = list(row.shape)
    shape[dim] = -length % multiple
    filled = torch.cat([row, row.new_zeros(shape)], dim)
    (places,) = places_of([length + shape[dim]], share)
    return filled.movedim(dim, 0)[torch.tensor(places, dtype=torch.int64)].movedim(0, dim)


def check_share(got: PackedSequences, whole: PackedSequences, share: tq.RowSlice, token_dims: dict[str, int]) -> None:
    """Assert that the pack of a rank has its tokens of the whole pack, and no others."""
    bounds = whole["cu_seqlens"].tolist()
    places = places_of(whole["cu_seqlens"].diff().tolist(), share)
    taken = torch.tensor([start + at for start, part in zip(bounds, places, strict=False) for at in part])
    for name, dim in token_dims.items():
        expected = whole[name].movedim(dim, 0)[taken].movedim(0, dim)
        assert same_bits(got[name], expected), name
    assert torch.equal(got["cu_seqlens"], whole["cu_seqlens"])
    assert got.max_seqlen == whole.max_seqlen
    is_padding = whole["padding_mask"][taken]
    assert got.num_padding == int(is_padding.sum())
    assert got.lengths == tuple(
        sum(at < length for at in part) for part, length in zip(places, whole.lengths, strict=False)
    )


@examples(60)
@given(
    lengths=st.lists(st.integers(0, 20), max_size=6),
    cp_size=st.integers(1, 4),
    layout=st.sampled_from(["contiguous", "zigzag"]),
    align=st.integers(1, 3),
    spare=st.integers(0, 3),
)
def test_packs_of_a_group_are_the_pack_of_whole_rows(
    lengths: list[int], cp_size: int, layout: Any, align: int, spare: int
) -> None:
    samples = random_samples(lengths, seed=len(lengths))
    token_dims = {**TOKEN_DIMS, **dict.fromkeys(("advantage", "flag", "position_ids", "padding_mask"), 0)}
    tokens = 0
    for rank in range(cp_size):
        share = tq.RowSlice.share(rank, cp_size, layout, align=align, fill=0)
        multiple = share.chunk_count * align
        size = multiple * (sum(-(-length // multiple) for length in lengths) + spare or 1)
        options = PackOptions(pack_max_length=size, padding_sequence_length=multiple, align=multiple, **OPTIONS)
        whole = pack_sequences(samples.batch, lengths, options)
        cut = {
            name: [share_of(row, TOKEN_DIMS[name], share) for row in rows] if name in TOKEN_DIMS else rows
            for name, rows in samples.rows.items()
        }
        got = pack_sequences(batch_of(cut), lengths, options, share=share)
        check_share(got, whole, share, token_dims)
        assert got["padding_mask"].shape == (size // cp_size,)
        parts = got.split_tokens(got["input_ids"])
        if 0 not in got.lengths:
            rows = unpack_sequences(got)["input_ids"].unbind() if lengths else ()
            assert all(same_bits(row, part) for row, part in zip(rows, parts, strict=True))
        for part, row in zip(parts, cut["input_ids"], strict=True):
            assert same_bits(part, row[: len(part)])
        tokens += got.token_count
    assert tokens == sum(lengths)


@pytest.fixture
def filled(server: LiveServer) -> LiveServer:
    client = server.client()
    client.create_partition("train", fields=[tq.FieldSpec(name, layout="jagged") for name in FIELDS[1:3]])
    rows = [torch.arange(length) + 100 * at for at, length in enumerate(LENGTHS)]
    data = {
        "index": torch.arange(len(rows)),
        "input_ids": rows,
        "labels": [row.to(torch.int32) for row in rows],
        "advantage": torch.arange(len(rows)) / 4,
    }
    client.put("train", data, custom_meta={"total_lengths": LENGTHS})
    client.seal_partition("train")
    return server


PACK = PackOptions(pack_max_length=48, pad_token_id=3, padding_sequence_length=8, align=8, repeat_fields=("advantage",))


def dataset_of(server: LiveServer, **changes: Any) -> StreamingDataset:
    options: dict[str, Any] = {
        "batch_size": 6, "data_fields": FIELDS, "partition_id": "train", "task_name": "train", "max_wait": 0.5,
        "sampler": "packed", "sampler_config": {"optimizer_steps": 1, "pack_max_length": 48, "align": 8}, "pack": PACK,
    }  # fmt: skip
    return StreamingDataset(server.address, **{**options, **changes})


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_group_gets_the_packs_that_one_rank_would_get(filled: LiveServer, layout: Any) -> None:
    whole: list[PackedMicroBatch] = list(StreamingDataLoader(dataset_of(filled)))
    assert sum(pack.token_count for pack in whole) == sum(LENGTHS)
    dims = dict.fromkeys(("input_ids", "labels", "advantage", "position_ids", "padding_mask"), 0)
    tokens = 0
    for rank in range(4):
        share = tq.RowSlice.share(rank, 4, layout)
        dataset = dataset_of(filled, cp_rank=rank, cp_size=4, cp_fields=["input_ids", "labels"], cp_layout=layout)
        with StreamingDataLoader(dataset, num_workers=rank % 2) as loader:
            packs: list[PackedMicroBatch] = list(loader)
        for got, expected in zip(packs, whole, strict=True):
            check_share(got, expected, share, dims)
            assert got["index"].tolist() == expected["index"].tolist()
            assert (got.step, got.pack) == (expected.step, expected.pack)
            assert got.step_token_count == expected.step_token_count
            tokens += got.token_count
    assert tokens == sum(LENGTHS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sampler": "sequential", "sampler_config": {}}, "but no row lengths; expected a plan"),
        ({"cp_fields": ["input_ids"]}, "as many as 'input_ids'"),
    ],
)
def test_what_the_plan_or_the_fields_lack_is_told(filled: LiveServer, changes: dict[str, Any], says: str) -> None:
    dataset = dataset_of(filled, **{"cp_size": 2, "cp_fields": ["input_ids", "labels"], **changes})
    with pytest.raises(ValueError, match=re.escape(says)):
        list(StreamingDataLoader(dataset))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cp_align": 2}, "cp_align: got 2"),
        ({"cp_fill": {"labels": -100}}, "cp_fill: got {'labels': -100}; expected no cp_fill with pack"),
        ({"cp_size": 3}, "pack: got align 8; expected a multiple of 6, the chunk count"),
        ({"read_options": {"slices": {"index": (0, 1)}}}, "pack: got pack as well as read_options"),
    ],
)
def test_shares_and_packs_that_do_not_agree_are_refused(server: LiveServer, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(tq.errors.InvalidArgumentError, match=re.escape(says)):
        dataset_of(server, **{"cp_size": 2, "cp_fields": ["input_ids", "labels"], **changes})


@pytest.mark.parametrize(
    ("share", "changes", "says"),
    [
        (tq.RowSlice(ranges=(0, 4), fill=None), {}, "share: got a slice that lacks chunks or fill"),
        (tq.RowSlice.share(0, 2), {}, "share: got a slice that lacks chunks or fill"),
        (tq.RowSlice.share(0, 2, fill=0), {"align": 2}, "align: got 2; expected 4"),
        (tq.RowSlice.share(0, 2, fill=0), {"overlong": "truncate"}, "overlong: got 'truncate' with shares"),
    ],
)
def test_shares_that_make_no_pack_are_refused(share: tq.RowSlice, changes: dict[str, Any], says: str) -> None:
    options = replace(PackOptions(pack_max_length=8, align=4), **changes)
    with pytest.raises(tq.errors.InvalidArgumentError, match=re.escape(says)):
        pack_sequences(random_samples([4]).batch, [4], options, share=share)


def test_shares_of_other_rows_than_planned_are_told() -> None:
    share = tq.RowSlice.share(1, 2, fill=0)
    options = PackOptions(pack_max_length=16, align=4, **OPTIONS)
    with pytest.raises(ValueError, match=re.escape("got shares of [5] tokens; expected [4]")):
        pack_sequences(random_samples([5]).batch, [6], options, share=share)
