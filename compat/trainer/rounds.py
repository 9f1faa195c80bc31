"""Decides what verl leaves to races: which prompts are answered, and when. This makes two runs the same.

The trainer requests a batch of finished prompts, takes the oldest, and interrupts the others. Which prompts have
finished by then, and how far the others are, depends on the speed of machines. Here the servers ask before they answer.
A round lasts from the start of a sampling to the interruption. In it as many prompts are answered as the trainer
requested, oldest first, and no others. None is answered before all sessions of all prompts have asked, so each of the
others is interrupted at the same place. A prompt that the trainer will evict is answered alone, and the next one once
its refill has asked.

The trainer checks every few seconds which prompts have finished. They are answered just before it checks (`admit`), and
the check waits until all of them have finished. It therefore sees none of them or all.
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
        """Start a round, in which the trainer wants `batch_size` prompts."""
        self._round += 1
        self._wanted_count = batch_size

    async def may_generate(self, server: str, request_id: str) -> str:
        """Wait for the decision to answer or interrupt a session, and return it; other requests are always answered."""
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
        """Let the prompts whose turn it is be answered; return them."""
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
        """Return whether a "late" prompt would still be in time, as it must be answered in a later round."""
        return prompt.fate == "late" and self._round <= prompt.submitted_in + _LATE_ROUNDS


@functools.cache
def rounds() -> Any:
    """Return the Ray actor with the rounds of this run; it lives as long as any process that requested it."""
    import ray

    fates = os.environ[EVICTED_VARIABLE].split(",")
    actor = ray.remote(Rounds).options(name="compat_rounds", get_if_exists=True, max_concurrency=1000)
    return actor.remote(fates)
