"""Calls are answered by the controller that leads, and only while no other one can."""

from __future__ import annotations

from typing import Any, Protocol

from tq_service.errors import NotLeaderError
from tq_service.server.rpc.method_table import Method
from tq_service.server.rpc.middleware import Behavior, Caller, Context, EndableCalls, Middleware, passing_answers


class Standing(Protocol):
    """Whether this controller leads."""

    @property
    def may_answer(self) -> bool:
        """Whether it leads, and no other one can at this moment."""
        ...

    @property
    def leader_address(self) -> str:
        """Where the controller is that leads, "" where that is not known."""
        ...

    @property
    def epoch(self) -> int:
        """Of the leader; 0: none is known."""
        ...


class OnlyLeader(Middleware):
    """Refuses the calls of a standby; and answers that a leader has ready once it may have been superseded.

    So it is around what makes answers wait until they are durable. A process that was paused for longer than its lease
    finds that out here, before it sends what it had read before. Calls that wait, for samples or for etcd, are ended by
    `end_calls`: their callers are to ask the controller that leads. Confined to one event loop.

    Args:
        standing: of this controller.
    """

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._running = EndableCalls()

    def end_calls(self) -> None:
        """Refuse the calls that are under way; what they have changed may stay, as where an answer is lost."""
        self._running.end(lambda _owner: self._refusal())

    def wrap(self, method: Method, caller: Caller, behavior: Behavior) -> Behavior:
        """Return what answers a method where this controller leads; probes are answered by each one."""
        standing = self._standing

        async def checked(answer: Any) -> Any:
            if not standing.may_answer:
                raise self._refusal()
            return answer

        async def call(request: Any, context: Context) -> Any:
            if not standing.may_answer:
                raise self._refusal()
            try:
                answer = await self._running.run(behavior(request, context))
            except Exception:  # what it says may be of a state that is not that of the cluster any more
                if not standing.may_answer:
                    raise self._refusal() from None
                raise
            if not standing.may_answer:
                raise self._refusal()
            return answer

        if method.is_open:
            return behavior
        if method.has_response_stream:
            behavior = passing_answers(method, behavior, checked)
        return call

    def _refusal(self) -> NotLeaderError:
        address = self._standing.leader_address
        where = f"that at {address} does" if address else "none is known to, another one takes over soon"
        return NotLeaderError(
            f"this controller does not lead its cluster at the moment: {where}; ask it, under the same request_id",
            metadata={"leader_address": address, "epoch": str(self._standing.epoch)},
        )
