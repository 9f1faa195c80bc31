"""The packs of a batch, and the loader that yields them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from fake_client import FakeService, token_rows
from pack_samples import OPTIONS, Samples, batch_of, check_fields, check_layout, random_samples

from tq_service.client.batch_meta import BatchMeta, Pack, Step
from tq_service.data import (
    PackedMicroBatch,
    PackOptions,
    StreamingDataLoader,
    StreamingDataset,
    fetch_batch,
    split_packs,
)
from tq_service.errors import InvalidArgumentError
from tq_service.samplers import PackedSampler

LENGTHS = [5, 3, 8, 1, 4]
SIZE = 10


def meta_of(*steps: list[list[int]], lengths: list[int] = LENGTHS, size: int = SIZE) -> BatchMeta:
    """Return the meta of a batch with a plan, whose samples are 100, 101, ..."""
    return BatchMeta(
        indexes=np.arange(len(lengths), dtype=np.int64) + 100,
        steps=tuple(Step(packs=tuple(pack_of(positions, lengths, size) for positions in packs)) for packs in steps),
    )


def pack_of(positions: list[int], lengths: list[int], size: int) -> Pack:
    taken = tuple(lengths[position] for position in positions)
    return Pack(positions=tuple(positions), lengths=taken or None, padding_tokens=size - sum(taken))


def packs_of(samples: Samples, meta: BatchMeta, **changes: Any) -> list[PackedMicroBatch]:
    return list(split_packs(samples.batch, meta, PackOptions(**{"pack_max_length": SIZE, **OPTIONS, **changes})))


def test_packs_come_with_their_place_in_the_steps() -> None:
    samples = random_samples(LENGTHS)
    meta = meta_of([[2, 3], [0, 4]], [[1]], [[]])
    options = PackOptions(pack_max_length=SIZE, **OPTIONS)
    packs = packs_of(samples, meta)
    assert [(pack.step, pack.pack, pack.pack_count, pack.ends_step) for pack in packs] == [
        (0, 0, 2, False),
        (0, 1, 2, True),
        (1, 0, 1, True),
        (2, 0, 1, True),
    ]
    assert [pack.step_count for pack in packs] == [3] * 4
    assert [pack.step_token_count for pack in packs] == [18, 18, 3, 0]
    assert [pack.meta.global_indexes for pack in packs] == [[102, 103], [100, 104], [101], []]
    for pack, positions in zip(packs, meta.micro_batches, strict=True):
        check_layout(pack, [LENGTHS[position] for position in positions], options)
        check_fields(pack, samples, positions)
        assert pack.meta.micro_batches == [list(range(len(positions)))]


def test_a_rank_without_samples_gets_as_many_packs() -> None:
    batch = batch_of({name: [] for name in random_samples([1]).rows})
    packs = list(split_packs(batch, meta_of([[], []], [[]], lengths=[]), PackOptions(pack_max_length=SIZE, **OPTIONS)))
    assert [(pack.step, pack.ends_step) for pack in packs] == [(0, False), (0, True), (1, True)]
    assert [pack.num_padding for pack in packs] == [SIZE] * 3
    like = packs_of(random_samples(LENGTHS), meta_of([[0]]))[0]
    for pack in packs:
        assert {name: tensor.dtype for name, tensor in pack.tensors.items()} == {
            name: tensor.dtype for name, tensor in like.tensors.items()
        }


def test_plans_without_packs_are_packed_if_they_fit() -> None:
    samples = random_samples(LENGTHS)
    plain = meta_of()
    assert [pack.lengths for pack in packs_of(samples, plain, pack_max_length=21)] == [tuple(LENGTHS)]
    options = PackOptions(pack_max_length=12, **OPTIONS)
    cut = list(split_packs(samples.batch, plain, options, micro_batch_size=2))
    assert [(pack.lengths, pack.ends_step) for pack in cut] == [((5, 3), False), ((8, 1), False), ((4,), True)]
    with pytest.raises(ValueError, match="got 21 tokens in 5 samples; expected at most pack_max_length = 10"):
        packs_of(samples, plain)


def test_samples_in_no_pack_are_left_out() -> None:
    packs = packs_of(random_samples([5, 30, 2]), meta_of([[2, 0]], lengths=[5, 30, 2]))
    assert [pack.meta.global_indexes for pack in packs] == [[102, 100]]


def test_a_plan_for_packs_of_another_length_is_refused() -> None:
    not_filled = "5 tokens and 5 padding tokens; expected 6 padding tokens, to fill pack_max_length = 11"
    with pytest.raises(ValueError, match=not_filled):
        packs_of(random_samples(LENGTHS), meta_of([[0]]), pack_max_length=11)
    with pytest.raises(ValueError, match="the batch has 1 rows, but its meta has 5 samples"):
        packs_of(random_samples([5]), meta_of([[0]]))


def test_a_moved_pack_keeps_its_place() -> None:
    pack = packs_of(random_samples(LENGTHS), meta_of([[2, 3], [0, 4]]))[1].to("meta")
    assert isinstance(pack, PackedMicroBatch)
    assert pack["input_ids"].device.type == "meta"
    assert pack.ends_step
    assert pack.meta.global_indexes == [100, 104]


def dataset_of(service: FakeService, **changes: Any) -> StreamingDataset:
    options: dict[str, Any] = {
        "batch_size": 4, "data_fields": ["index", "input_ids", "logprobs"], "partition_id": "train@0", "task_name": "t",
        "client_factory": service.connect, "max_wait": 0.2, "fetch_batch_fn": fetch_without_text,
    }  # fmt: skip
    return StreamingDataset(None, **{**options, **changes})


def fetch_without_text(**keywords: Any) -> Any:
    data, meta = fetch_batch(**keywords)
    return data if data is None else data.exclude("text"), meta


@pytest.mark.parametrize("load", [iter, StreamingDataLoader])
def test_the_loader_yields_packs_and_they_are_the_same_after_a_reset(load: Any) -> None:
    service = FakeService()
    service.cuts = lambda count, _: [[3, 0], [], [2, 1]] if count == 4 else [[0, 1], [], []]
    service.put("train@0", token_rows(6), seal=True)
    dataset = dataset_of(service, pack=PackOptions(pack_max_length=6, repeat_fields=["index"]))
    first = list(load(dataset))
    dataset.reset()
    again = list(load(dataset))
    assert [pack.meta.global_indexes for pack in first] == [[3, 0], [], [2, 1], [4, 5], [], []]
    assert [pack.ends_step for pack in first] == [False, False, True] * 2
    assert first[2]["input_ids"].tolist() == [2, 2, 1, 0, 0, 0]
    assert first[2]["index"].tolist() == [2, 2, 1, 0, 0, 0]
    for one, other in zip(first, again, strict=True):
        assert one.meta == other.meta
        assert all(torch.equal(one[name], other[name]) for name in one.tensors.keys())  # noqa: SIM118 (a TensorDict)


def test_options_of_the_dataset_that_cannot_be_right() -> None:
    options = PackOptions(pack_max_length=6)
    service = FakeService()
    with pytest.raises(
        InvalidArgumentError, match="pack: got pack as well as process_batch_fn; expected only one of the two"
    ):
        dataset_of(service, pack=options, process_batch_fn=lambda data, meta, micro_batch_size: [])
    with pytest.raises(InvalidArgumentError, match="pack_max_length 6; expected 8, the sampler's pack_max_length"):
        dataset_of(service, pack=options, sampler="packed", sampler_config={"pack_max_length": 8})
    with pytest.raises(InvalidArgumentError, match="overlong 'error'; expected 'truncate', to match the sampler"):
        dataset_of(service, pack=options, sampler="packed", sampler_config={"overlong": "truncate"})
    dataset_of(service, pack=options, sampler="packed", sampler_config={"overlong": "drop", "pack_max_length": 6})
    with pytest.raises(InvalidArgumentError, match="pack_max_length 6; expected 8, the sampler's pack_max_length"):
        dataset_of(service, pack=options, sampler=PackedSampler(optimizer_steps=1, pack_max_length=8))


def test_options_and_packs_can_be_pickled() -> None:
    options = PackOptions(pack_max_length=6, keep_fields=["patches"])
    assert pickle.loads(pickle.dumps(options)) == options
