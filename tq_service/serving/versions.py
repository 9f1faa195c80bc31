"""Calls that wait until a version of a policy is published."""

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
    """One waiting call.

    Attributes:
        at_least: the lowest version that ends the wait.
    """

    at_least: int
    reached: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, error: Callable[[], TqError]) -> None:
        """End the wait with an error, unless it has ended."""
        if not self.reached.done():
            self.reached.set_exception(error())


class VersionWaits:
    """The calls that wait for versions. Confined to one event loop.

    Args:
        policies: the published versions. `wake` must be called after each change.
    """

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._waiting: dict[str, dict[VersionWait, None]] = {}  # by policy
        self._claims: dict[Partition, dict[VersionWait, ClaimRequest]] = {}  # those of the calls that are claims
        self._end_error: Callable[[], TqError] | None = None

    def wake(self, policy: str) -> None:
        """End the waits for versions up to the published one."""
        for wait in self._waiting.get(policy, ()):
            if self.is_published(policy, wait.at_least) and not wait.reached.done():
                wait.reached.set_result(None)

    def end(self, error: Callable[[], TqError]) -> None:
        """End all current and future waits with an error."""
        self._end_error = error
        for waits in self._waiting.values():
            for wait in waits:
                wait.end(error)

    def is_published(self, policy: str, at_least: int) -> bool:
        """Whether this or a later version of a policy is published."""
        known = self._policies.get(policy)
        return known is not None and known.version >= at_least

    def claims(self, partition: Partition) -> list[ClaimRequest]:
        """Return the claims of a partition that wait for a version, in order of arrival."""
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
        """Return a policy once this version or a later one is published, or its state at the deadline (None: unknown).

        Args:
            policy: name of the policy.
            at_least: the version to wait for.
            deadline: time on the clock of the event loop.
            while_waiting: context held while the call waits.
            claim: the waiting claim and its partition; None if the call is not a claim.
            enders: a set that contains, during the wait, the function that ends the wait with an error.

        Raises:
            TqError: the wait was ended.
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
    """Remove a wait, and with the last wait the entry of its policy or partition."""
    del waits_by[key][wait]
    if not waits_by[key]:
        del waits_by[key]
