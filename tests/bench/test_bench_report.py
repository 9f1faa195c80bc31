from __future__ import annotations

import asyncio
from functools import partial

from benchmarks.__main__ import _summary
from benchmarks.harness import interleave, interleave_async, median_ratio
from benchmarks.report import Aim, Report, aim_text

MET = Aim(what="ratio", measured=3.0, wanted=2.0)
MISSED = Aim(what="latency", measured=3.0, wanted=2.0, at_least=False)
UNMEASURED = Aim(what="of the peer", measured=None, wanted=2.0)


def report(*aims: Aim) -> Report:
    return Report(name="one", question="How?", columns=["what"], rows=[["this"]], aims=aims, without=["Ray"])


def test_an_aim_is_met_missed_or_not_measured() -> None:
    assert [aim.met for aim in (MET, MISSED, UNMEASURED)] == [True, False, None]
    assert aim_text(MET) == "ratio: 3, at least 2 wanted: met"
    assert aim_text(MISSED) == "latency: 3, at most 2 wanted: **missed**"
    assert aim_text(UNMEASURED) == "of the peer: at least 2 wanted: not measured"


def test_the_summary_tells_missed_aims_from_those_not_measured() -> None:
    assert _summary([report(MET)]) == ["All aims are met.", ""]
    lines = _summary([report(MET, MISSED, UNMEASURED)])
    assert lines == [
        "Missed aims:", "", f"- one: {aim_text(MISSED)}", "",
        "Aims that could not be measured:", "", f"- one: {aim_text(UNMEASURED)}", "",
    ]  # fmt: skip


def test_a_report_is_the_same_after_json() -> None:
    before = report(MET, UNMEASURED)
    after = Report.from_json(before.to_json())
    assert after.to_json() == before.to_json()
    assert [aim.met for aim in after.aims] == [True, None]
    assert after.without == ["Ray"]


def test_every_other_round_goes_the_other_way_and_the_first_does_not_count() -> None:
    order: list[str] = []

    def measure(name: str) -> int:
        order.append(name)
        return len(order)

    async def measure_async(name: str) -> int:
        return measure(name)

    results = interleave({name: partial(measure, name) for name in "abc"}, repeats=2)
    assert order == [*"abc", *"cba", *"abc"]
    assert results == {"a": [6, 7], "b": [5, 8], "c": [4, 9]}
    order.clear()
    assert results == asyncio.run(interleave_async({name: partial(measure_async, name) for name in "abc"}, repeats=2))


def test_a_ratio_is_taken_repeat_by_repeat() -> None:
    assert median_ratio([1.0, 10.0, 9.0], [1.0, 2.0, 3.0]) == 3.0
