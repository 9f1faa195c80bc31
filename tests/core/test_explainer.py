"""Explanations of waits keep nothing of partitions that are gone, and have words for all that samples may lack."""

import asyncio
import gc
import weakref
from pathlib import Path

import pytest
from domain_support import asks, new_write, turns

from tq_service.results import Lack, NotReady, WaitCode
from tq_service.samplers import PlanRunner
from tq_service.serving import explain as explain_module
from tq_service.serving.catalog import Catalog
from tq_service.serving.explain import Explainer


@pytest.fixture
async def catalog(monkeypatch):
    monkeypatch.setattr(explain_module, "_SHARED_ROWS", 16)  # the explanations of larger partitions are shared
    return Catalog(PlanRunner())


async def test_a_cleared_partition_goes_though_explanations_of_it_are_fresh(catalog):
    explainer = Explainer(catalog, PlanRunner())
    gone = weakref.ref(catalog.write("train", b"", new_write(100, ("x",))).partition)
    reasons = await asyncio.gather(*(explainer.explain("train", asks(data_fields=("y",)), ["train"]) for _ in range(3)))
    assert reasons[0] is reasons[1] is reasons[2]
    catalog.remove("train", b"")
    await turns()
    gc.collect()
    assert gone() is None


async def test_explanations_are_kept_as_long_as_they_are_fresh(catalog, monkeypatch):
    monkeypatch.setattr(explain_module, "_FRESH_SECONDS", 0.0)
    explainer = Explainer(catalog, PlanRunner())
    catalog.write("train", b"", new_write(100, ("x",)))
    for number in range(20):
        await explainer.explain("train", asks(task=f"t{number}", data_fields=("y",)), ["train"])
        await turns()
    assert len(explainer._recent) == 0


def test_each_reason_has_a_sentence_and_is_in_the_proto():
    proto = (Path(__file__).parents[2] / "protos/tq_service/v1/controller_service.proto").read_text()
    for lack in Lack:
        named = NotReady(kind=lack.kind, name="x", sample_count=3, ends_in_seconds=1.0, example="a group")
        assert "3" in lack.value.format(named).split()[:2]
        assert f'"{lack.kind}"' in proto
    assert all(code in proto for code in WaitCode)
