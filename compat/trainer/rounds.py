"""Decides what verl leaves to races: which prompts are answered when, so that two runs are the same.

The trainer asks for a batch of finished prompts, takes the oldest, and interrupts the others. Which ones have finished
by then, and how far the others are, depends on the speed of machines. Here, the servers ask before they answer. In each
round, from the start of a sampling to the interruption, the oldest prompts are answered, as many as the trainer asked
for, and no others. None is before all sessions of all prompts have asked, so that each of them is interrupted, and each
at the same place. A prompt that the trainer is going to evict goes alone, and the next one when its refill has asked.

The trainer looks every few seconds which prompts have finished. They are answered when it is about to look (`admit`),
and it looks when all of them have finished: what it sees is none of them or all.
"""

from __future__ import annotations

import asyncio
import functools
import os
from dataclasses import dataclass, field
from typing import Any

EVICTED_VARIABLE = "TQ_COMPAT_EVICTED_FATES"
GENERATE, ABORT = "generate", "abort"
_LATE_ROUNDS = 2


@dataclass(slots=True, kw_only=True)
class _Prompt:
    fate: str
    session_count: int
    submitted_in: int
    admitted: bool = False
    waiting: dict[str, tuple[str, asyncio.Future[str]]] = field(default_factory=dict)


class Rounds:
    """The rounds of a run; see `rounds`."""

    def __init__(self, evicted_fates: list[str]) -> None:
        self._evicted_fates = frozenset(evicted_fates)
        self._prompts: dict[str, _Prompt] = {}
        self._round = 0
        self._wanted_count = 0
        self._refill_count = 0

    async def submitted(self, uids: list[str], fates: list[str], session_count: int) -> None:
        """Expect the sessions of prompts, in this order."""
        for uid, fate in zip(uids, fates, strict=True):
            self._prompts[uid] = _Prompt(fate=fate, session_count=session_count, submitted_in=self._round)
        self._refill_count = max(0, self._refill_count - len(uids))

    async def begin(self, batch_size: int) -> None:
        """Start a round, in which the trainer wants so many prompts."""
        self._round += 1
        self._wanted_count = batch_size

    async def may_generate(self, server: str, request_id: str) -> str:
        """Wait until a session is to be answered or interrupted, and return which; all others are answered."""
        uid, session, turn = request_id.split(":")
        prompt = self._prompts.get(uid)
        if prompt is None or prompt.admitted or turn != "0":
            return GENERATE
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        prompt.waiting[session] = (server, answer)
        return await answer

    async def abort(self, server: str) -> None:
        """End the round, and interrupt the sessions that wait at a server."""
        self._wanted_count = 0
        for prompt in self._prompts.values():
            for session, (where, answer) in list(prompt.waiting.items()):
                if where == server:
                    answer.set_result(ABORT)
                    del prompt.waiting[session]

    async def admit(self) -> list[str]:
        """Have prompts answered where it is their turn; return them."""
        uids = self._next() if self._wanted_count and not self._refill_count and self._all_wait() else []
        for prompt in map(self._prompts.__getitem__, uids):
            prompt.admitted = True
            for _, answer in prompt.waiting.values():
                answer.set_result(GENERATE)
            prompt.waiting.clear()
        return uids

    def _next(self) -> list[str]:
        good: list[str] = []
        for uid, prompt in self._open().items():
            if self._is_early(prompt):
                continue
            if prompt.fate in self._evicted_fates:
                self._refill_count = 1
                return [uid]
            good.append(uid)
            if len(good) == self._wanted_count:
                self._wanted_count = 0
                return good
        return []

    def _open(self) -> dict[str, _Prompt]:
        return {uid: prompt for uid, prompt in self._prompts.items() if not prompt.admitted}

    def _all_wait(self) -> bool:
        return all(len(prompt.waiting) == prompt.session_count for prompt in self._open().values())

    def _is_early(self, prompt: _Prompt) -> bool:
        """Return whether a prompt that is to come late would come in time: it is submitted for the round after."""
        return prompt.fate == "late" and self._round <= prompt.submitted_in + _LATE_ROUNDS


@functools.cache
def rounds() -> Any:
    """Return the Ray actor that has the rounds of this run; it lives as long as a process has asked for it."""
    import ray

    fates = os.environ[EVICTED_VARIABLE].split(",")
    actor = ray.remote(Rounds).options(name="compat_rounds", get_if_exists=True, max_concurrency=1000)
    return actor.remote(fates)
