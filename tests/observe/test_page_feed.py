"""The feed: one status for all readers, what it says while the service is away, and what it notes as an event."""

import asyncio
import json
from typing import Any

import pytest
from page_statuses import mirrored, partition, service, status, task, wait

from tq_service.errors import DeadlineError, UnauthenticatedError, UnavailableError
from tq_service.observe.page.feed import MOST_PARTITIONS, Feed
from tq_service.step_times import StepTimes


class FakeClient:
    """Answers `status` with what it is given, one after the other; the last one stays."""

    address = "tq.example:50051"
    namespace = ""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.call_count = 0

    async def status(self, *, prefix: str = "", explain: bool = False, timeout: float | None = None) -> Any:
        assert explain
        self.call_count += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def frames_of(*answers: Any) -> list[dict[str, Any]]:
    """Return the frame after each answer."""
    feed = Feed(FakeClient(*answers), interval_seconds=0.0)  # type: ignore[arg-type]
    frames = []
    for _ in answers:
        await feed.look()
        frames.append(json.loads(await anext(feed.frames())))
    return frames


async def test_a_frame_has_all_that_the_page_shows() -> None:
    one = partition("train@0", 8, expected_samples=16)
    (frame,) = await frames_of(status(one, waits=(wait(), wait("trian@0"))))
    assert (frame["state"], frame["address"], frame["away_seconds"]) == ("serving", "tq.example:50051", None)
    (shown,) = frame["status"]["partitions"]
    assert (shown["summary"]["inserted_count"], shown["expected_samples"]) == (8, 16)
    assert (shown["summary"]["partition_id"], shown["fields"][0]["spec"]["name"]) == ("train@0", "x")
    assert [each["partition_id"] for each in frame["status"]["waits"]] == ["train@0", "trian@0"]
    assert frame["status"]["totals"]["max_bytes"] == 1000
    assert frame["status"]["storages"][0]["storage_id"] == "s0"


async def test_a_frame_has_where_the_time_of_steps_went() -> None:
    times = StepTimes(work_seconds=1.0, rollouts_seconds=2.0, transfer_seconds=1.0, batch_count=2, rank_count=4)
    (frame,) = await frames_of(status(partition("train@0", tasks=(task(step_times=times), task("other")))))
    (step,) = frame["status"]["steps"]
    assert (step["group"], step["task"], step["rank_count"]) == ("train", "update", 4)
    assert (step["shares"]["rollouts"], step["data_plane_share"]) == (0.5, 0.25)
    assert step["advice"].startswith("waiting for rollouts takes 50 % of the step")
    assert step["text"] == "2.00 s per batch: rollouts 50 %, work 25 %, transfer 25 %"


async def test_a_frame_does_not_say_where_the_service_has_its_data() -> None:
    (frame,) = await frames_of(status(service=service(data_dir="/var/lib/tq")))
    assert "/var/lib" not in json.dumps(frame)
    assert frame["status"]["service"]["instance_id"] == "61" * 16


async def test_a_frame_has_mirrors_and_counts_what_was_taken_over_once() -> None:
    plain, frame = await frames_of(status(), status(storages=mirrored()))
    assert (plain["status"]["storages"][0]["mirror"], plain["status"]["storages"][0]["is_adopted"]) == (None, False)
    shown = frame["status"]["storages"]
    assert [(each["storage_id"], each["is_adopted"], each["successor"]) for each in shown] == [
        ("s0", False, None), ("s0", True, "s1"), ("s1", False, None), ("s2", False, None),
    ]  # fmt: skip
    assert [each["mirror"] and each["mirror"]["is_reachable"] for each in shown] == [False, None, True, None]
    assert shown[1]["mirror"] == {
        "url": "s3://bucket/prefix", "is_reachable": None, "unmirrored_bytes": 0, "short_put_count": 0,
        "unfetched_put_count": 2, "spilled_bytes": 0,
    }  # fmt: skip
    totals = frame["status"]["totals"]
    assert (totals["used_bytes"], totals["max_bytes"], totals["curves"]["used"]) == (300, 3000, [100, 300])


async def test_a_service_that_is_away_leaves_its_last_state_and_is_noted_once() -> None:
    gone = UnavailableError("cannot reach tq.example:50051: connection refused")
    before, away, still, back = await frames_of(status(partition()), gone, gone, status(partition()))
    assert before["events"] == []
    assert (away["state"], away["problem"]) == ("away", gone.message)
    assert away["status"]["partitions"][0]["summary"]["partition_id"] == "train@0"
    assert still["away_seconds"] >= away["away_seconds"] >= 0
    assert [event["kind"] for event in still["events"]] == ["away"]
    assert [event["kind"] for event in back["events"]] == ["away", "back"]
    assert (back["state"], back["away_seconds"]) == ("serving", None)
    assert back["status"]["totals"]["curves"]["present"] == [8, None, None, 8]


async def test_a_service_that_was_never_there_is_away_too() -> None:
    away, slow, back = await frames_of(UnavailableError("refused"), DeadlineError("late"), status())
    assert (away["state"], away["status"], away["seen_seconds"]) == ("away", None, None)
    assert slow["problem"].startswith("no reply within")
    assert back["status"]["partitions"] == []


async def test_a_token_that_is_refused_is_said_as_such() -> None:
    (frame,) = await frames_of(UnauthenticatedError("this service asks for a bearer token"))
    assert (frame["state"], frame["events"][0]["kind"]) == ("refused", "refused")


async def test_partitions_that_moved_last_are_shown_where_there_are_too_many() -> None:
    many = [partition(f"p{number}", 1) for number in range(MOST_PARTITIONS + 5)]
    moved = [partition("p3", 2) if number == 3 else one for number, one in enumerate(many)]
    _, frame = await frames_of(status(*many), status(*moved))
    assert len(frame["status"]["partitions"]) == MOST_PARTITIONS
    assert frame["status"]["partitions"][0]["summary"]["partition_id"] == "p3"
    assert frame["status"]["hidden_partition_count"] == 5
    assert frame["status"]["totals"]["partition_count"] == MOST_PARTITIONS + 5


async def test_readers_share_one_status_and_a_slow_one_gets_the_newest_frame() -> None:
    client = FakeClient(status(partition()))
    feed = Feed(client, interval_seconds=0.0)  # type: ignore[arg-type]
    slow, quick = feed.frames(), feed.frames()
    await feed.look()
    first = await anext(slow)
    assert await anext(quick) is first
    await feed.look()
    await feed.look()
    newest = await anext(slow)
    assert await anext(quick) is newest
    assert client.call_count == 3
    pending = asyncio.ensure_future(anext(slow))
    await asyncio.sleep(0)
    assert not pending.done()
    feed.close()
    with pytest.raises(StopAsyncIteration):
        await pending


async def test_what_has_changed_is_an_event_also_while_the_service_was_away() -> None:
    gone = UnavailableError("refused")
    *_, frame = await frames_of(status(partition("train@0")), gone, status(partition("train@1")))
    of_partitions = [(event["kind"], event["name"]) for event in frame["events"] if event["name"]]
    assert of_partitions == [("cleared", "train@0"), ("made", "train@1")]


async def test_the_service_is_read_until_the_end() -> None:
    client = FakeClient(status())
    feed = Feed(client, interval_seconds=0.0)  # type: ignore[arg-type]
    running = asyncio.create_task(feed.run())
    frames = feed.frames()
    for _ in range(3):
        await anext(frames)
    assert client.call_count >= 3
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
