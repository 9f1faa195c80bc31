from __future__ import annotations

import asyncio

import pytest

from compat.trainer.rounds import ABORT, GENERATE, Rounds

SESSIONS = 2


class Asked:
    """The sessions of prompts, which have asked."""

    def __init__(self, rounds: Rounds, uids: str, server: str) -> None:
        self.answers = {
            f"{uid}:{session}": asyncio.ensure_future(rounds.may_generate(server, f"{uid}:{session}:0"))
            for uid in uids
            for session in range(SESSIONS)
        }

    async def got(self) -> dict[str, str]:
        """Return the answers there are, by session."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return {name: answer.result() for name, answer in self.answers.items() if answer.done()}

    async def uids(self, answer: str) -> str:
        """Return the prompts all of whose sessions got an answer."""
        got = await self.got()
        uids = dict.fromkeys(name[0] for name, value in got.items() if value == answer)
        return "".join(uid for uid in uids if all(got.get(f"{uid}:{n}") == answer for n in range(SESSIONS)))


async def ask(rounds: Rounds, uids: str, server: str = "server 0") -> Asked:
    asked = Asked(rounds, uids, server)
    await asyncio.sleep(0)
    return asked


async def with_prompts(fates: dict[str, str], *, evicted: str = "fails late") -> Rounds:
    rounds = Rounds(evicted.split())
    await rounds.submitted(list(fates), list(fates.values()), SESSIONS)
    return rounds


async def begin(rounds: Rounds, batch_size: int) -> list[str]:
    """Begin a round, in which the trainer looks once."""
    await rounds.begin(batch_size)
    return await rounds.admit()


async def test_the_oldest_are_answered_when_all_have_asked_and_the_trainer_samples() -> None:
    rounds = await with_prompts(dict.fromkeys("abc", "good"))
    first = await ask(rounds, "ac")
    await begin(rounds, 2)
    assert await first.got() == {}  # b has not asked
    last = await ask(rounds, "b")
    assert await last.got() == {}  # the trainer has not looked
    assert await rounds.admit() == ["a", "b"]
    assert await first.uids(GENERATE) + await last.uids(GENERATE) == "ab"


async def test_nothing_is_answered_before_the_trainer_samples() -> None:
    rounds = await with_prompts(dict.fromkeys("ab", "good"))
    asked = await ask(rounds, "ab")
    assert await rounds.admit() == []
    assert await asked.got() == {}
    assert await begin(rounds, 1) == ["a"]
    assert await asked.uids(GENERATE) == "a"
    assert await rounds.admit() == []


async def test_an_abort_interrupts_the_sessions_of_its_server_and_ends_the_round() -> None:
    rounds = await with_prompts(dict.fromkeys("abc", "good"))
    here, there = await ask(rounds, "ab"), await ask(rounds, "c", "server 1")
    await begin(rounds, 1)
    await rounds.abort("server 0")
    assert await here.uids(GENERATE) == "a"
    assert await here.uids(ABORT) == "b"
    assert await there.got() == {}
    await rounds.abort("server 1")
    assert await there.uids(ABORT) == "c"


async def test_one_that_is_evicted_goes_alone_and_the_others_wait_for_its_refill() -> None:
    rounds = await with_prompts({"a": "good", "b": "fails", "c": "good"})
    asked = await ask(rounds, "abc")
    assert await begin(rounds, 2) == ["b"]
    assert await asked.uids(GENERATE) == "b"
    assert await rounds.admit() == []
    await rounds.submitted(["d"], ["good"], SESSIONS)
    assert await rounds.admit() == []
    refill = await ask(rounds, "d")
    assert await rounds.admit() == ["a", "c"]
    assert await asked.uids(GENERATE) == "abc"
    assert await refill.got() == {}


async def test_one_behind_those_that_are_enough_is_not_evicted_yet() -> None:
    rounds = await with_prompts({"a": "good", "b": "fails"})
    asked = await ask(rounds, "ab")
    await begin(rounds, 1)
    assert await asked.uids(GENERATE) == "a"


async def test_a_late_one_comes_two_rounds_after_it_could_have() -> None:
    rounds = await with_prompts({"a": "late", **dict.fromkeys("bcd", "good")})
    for uids, expected in (("abcd", "b"), ("acd", "c"), ("ad", "a")):
        asked = await ask(rounds, uids)
        await begin(rounds, 1)
        assert await asked.uids(GENERATE) == expected
        await rounds.abort("server 0")


@pytest.mark.parametrize("request_id", ["v:0:0", "a:0:1"])
async def test_validation_and_later_turns_do_not_wait(request_id: str) -> None:
    rounds = await with_prompts({"a": "good"})
    assert await rounds.may_generate("server 0", request_id) == GENERATE
