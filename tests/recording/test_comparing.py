"""Two steps in numbers, and what they differ in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from recording_support import step_of

from tq_service.recording.comparing import Spread, StepSamples, difference
from tq_service.recording.layout import RecordedStep
from tq_service.state.ledger import RecordedPlan
from tq_service.state.plan import BatchSpec, Pack
from tq_service.v1 import metadata_pb2
from tq_service.wire.metadata import encode_meta_columns, rows_to_meta_columns

SPEC = BatchSpec(
    batch_size=2,
    micro_batch_size=None,
    sampler_config="{}",
    where=(),
    order_by=(),
    data_fields=("x",),
    drop_last=False,
    finite=False,
)


def step(rows: Sequence[int], meta: Sequence[dict[str, Any]], **given: Any) -> RecordedStep:
    """Return a step of two ranks."""
    sizes = (len(rows) // 2, len(rows) - len(rows) // 2)
    message = metadata_pb2.BatchMeta(
        global_indexes=rows,
        keys=[f"k{row}" for row in rows],
        groups=[f"g{row // 2}" for row in rows],
        custom_meta=encode_meta_columns(rows_to_meta_columns(meta)),
        fields=[metadata_pb2.FieldSpec(name="x", dtype="int64", row_shape_known=True)],
    )
    plan = RecordedPlan(rows=np.array(rows), sizes=sizes)
    values = {"plan": plan, "meta": message.SerializeToString(), "batch_spec": SPEC, "policies": (("default", 3),)}
    return replace(step_of(0), **values | given)


def test_a_step_in_numbers() -> None:
    meta = [{"total_lengths": 10, "version": 3}, {"total_lengths": 20, "version": 1}, {"total_lengths": 40}, {}]
    facts = StepSamples(step([0, 1, 2, 3], meta)).facts()
    assert (facts.sample_count, facts.group_count, facts.samples_per_rank) == (4, 2, (2, 2))
    assert facts.tokens_per_rank is None  # the length of one sample is unknown
    assert facts.staleness == Spread(count=2, least=0, median=1, mean=1, most=2)
    meta[3] = {"total_lengths": 30}
    facts = StepSamples(step([0, 1, 2, 3], meta)).facts()
    assert facts.tokens_per_rank == (30, 70)
    assert facts.imbalance == pytest.approx(0.4)
    packs = ((Pack(positions=np.array([1, 0]), lengths=np.array([7, 5]), padding_tokens=4),),)
    plan = RecordedPlan(rows=np.arange(4), sizes=(2, 2), steps=(packs, packs))
    facts = StepSamples(step([0, 1, 2, 3], meta, plan=plan)).facts()
    assert (facts.tokens_per_rank, facts.padding_tokens, facts.lengths.least) == ((12, 12), 8, 5)


def test_what_differs_is_named() -> None:
    meta = [{"tag": "a", "n": 1}, {"tag": "b", "n": 2}, {"tag": "c", "n": 3}, {"tag": "d"}]
    first = step([0, 1, 2, 3], meta)
    changed = [meta[0], meta[3], {"tag": "B", "n": 2}, {"tag": "new", "n": 9}]
    second = step(
        [0, 3, 1, 8], changed, policies=(("default", 4), ("judge", 1)), batch_spec=replace(SPEC, sampler="packed")
    )
    found = difference(first, second)
    assert (found.matched_by, found.common_count, found.moved_count) == ("global_index", 3, 2)
    assert (found.only_first.first, found.only_second.first) == (("2",), ("8",))
    assert (found.groups_only_first.count, found.groups_only_second.first) == (0, ("g4",))
    assert {name: each.examples for name, each in found.changed_columns.items()} == {"tag": (("1", "b", "B"),)}
    assert found.request == {"sampler": ("sequential", "packed")}
    assert found.policies == {"default": (3, 4), "judge": (None, 1)}
    assert found.fields == {}


def test_samples_of_two_partitions_are_matched_by_key() -> None:
    meta = [{"n": 1}] * 4
    other = step([1, 2, 5, 6], meta, incarnation=b"o" * 16)
    found = difference(step([0, 1, 2, 3], meta), other)
    assert (found.matched_by, found.common_count, found.only_first.first) == ("key", 2, ("k0", "k3"))
    message = metadata_pb2.BatchMeta.FromString(other.meta)
    message.ClearField("keys")
    found = difference(step([0, 1, 2, 3], meta), replace(other, meta=message.SerializeToString()))
    assert (found.matched_by, found.common_count) == ("", 0)
