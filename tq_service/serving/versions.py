"""Calls that wait until a policy version is published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tq_service.errors import TqError
from tq_service.state.partition import Partition
from tq_service.state.plan import ClaimRequest
from tq_service.state.policies import Policies, Policy
from tq_service.wait_clock import Waiting, WhileWaiting

Enders: TypeAlias = set[Callable[[Callable[[], TqError]], None]]


@dataclass(slots=True, eq=False)
class VersionWait:
    """A call that waits for a policy version.

    Attributes:
        at_least: lowest version that ends the wait.
    """

    at_least: int
    reached: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, error: Callable[[], TqError]) -> None:
        """Fail the wait with the error returned by `error`, unless the wait has already ended."""
        if not self.reached.done():
            self.reached.set_exception(error())


class VersionWaits:
    """The calls that wait for policy versions. Use this class from a single event loop.

    Args:
        policies: policies and their published versions. The owner must call `wake` after each change to a policy.
    """

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._waiting: dict[str, dict[VersionWait, None]] = {}  # by policy name
        self._claims: dict[Partition, dict[VersionWait, ClaimRequest]] = {}  # waits of claims
        self._end_error: Callable[[], TqError] | None = None

    def wake(self, policy: str) -> None:
        """End all waits for versions of a policy that have been published."""
        for wait in self._waiting.get(policy, ()):
            if self.is_published(policy, wait.at_least) and not wait.reached.done():
                wait.reached.set_result(None)

    def end(self, error: Callable[[], TqError]) -> None:
        """Fail all current and future waits with the error returned by `error`."""
        self._end_error = error
        for waits in self._waiting.values():
            for wait in waits:
                wait.end(error)

    def is_published(self, policy: str, at_least: int) -> bool:
        """Whether a policy's published version is `at_least` or later."""
        known = self._policies.get(policy)
        return known is not None and known.version >= at_least

    def claims(self, partition: Partition) -> list[ClaimRequest]:
        """Return a partition's claims that are waiting for a version, in order of arrival."""
        return list(self._claims.get(partition, {}).values())

    async def until(
        self,
        policy: str,
        at_least: int,
        deadline: float,
        while_waiting: WhileWaiting = nullcontext,
        *,
        claim: tuple[Partition, ClaimRequest] | None = None,
        enders: Enders | None = None,
    ) -> Policy | None:
        """Wait for a policy version. Return the policy, or None if it still does not exist when the wait ends.

        Args:
            policy: name of the policy.
            at_least: lowest version that ends the wait.
            deadline: end of the wait, in event-loop time.
            while_waiting: context manager that is active while the call waits.
            claim: partition and request of the waiting claim, or None if the call is not a claim.
            enders: set of functions that end waiting calls with an error. During the wait, the set also contains a
                function that ends this call.

        Raises:
            TqError: the error that ended the wait.
        """
        loop = asyncio.get_running_loop()
        if self.is_published(policy, at_least) or loop.time() >= deadline:
            return self._policies.get(policy)
        if self._end_error is not None:
            raise self._end_error()
        with while_waiting():
            wait = VersionWait(at_least)
            self._waiting.setdefault(policy, {})[wait] = None
            if claim is not None:
                self._claims.setdefault(claim[0], {})[wait] = claim[1]
            if enders is not None:
                enders.add(wait.end)
            try:
                with Waiting():
                    await asyncio.wait((wait.reached,), timeout=deadline - loop.time())
                if wait.reached.done():
                    wait.reached.result()
                return self._policies.get(policy)
            finally:
                _remove(self._waiting, policy, wait)
                if claim is not None:
                    _remove(self._claims, claim[0], wait)
                if enders is not None:
                    enders.discard(wait.end)


def _remove(waits_by: dict[Any, dict[VersionWait, Any]], key: object, wait: VersionWait) -> None:
    """Remove a wait, and also remove the entry for its policy or partition if no other waits remain."""
    del waits_by[key][wait]
    if not waits_by[key]:
        del waits_by[key]
