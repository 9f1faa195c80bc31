"""Names that callers give to queue claims: what each stands for in this epoch of a task."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from tq_service.schema import EndCounts

MOST_PAST_NAMES: Final = 65_536
"""Most names of a task that stand for no claim any more and are remembered; the oldest ones are forgotten."""

Loss: TypeAlias = Literal["cleared", "released", "expired", "forgotten"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastName:
    """What a name stands for that stands for no claim: the end, or one that is no more what it was.

    Attributes:
        end: None: it stood for a claim.
        loss: what became of samples of the claim.
    """

    end: EndCounts | None = None
    loss: Loss | None = None


class ClaimNames:
    """The names of one task. Only its ledger changes them.

    Attributes:
        claims: the request_id of the claim that each name stands for.
        past: names that stand for none, the oldest first.
    """

    def __init__(self) -> None:
        self.claims: dict[str, bytes] = {}
        self.past: OrderedDict[str, PastName] = OrderedDict()

    def reach_end(self, name: str, end: EndCounts) -> None:
        """Have a name stand for the end."""
        self._remember(name, PastName(end=end))

    def lose(self, name: str, request_id: bytes, loss: Loss) -> None:
        """Have a name stand for a claim no more, if it does."""
        if self.claims.get(name) == request_id:
            del self.claims[name]
            self._remember(name, PastName(loss=loss))

    def _remember(self, name: str, past: PastName) -> None:
        self.past[name] = past
        if len(self.past) > MOST_PAST_NAMES:
            self.past.popitem(last=False)

    def clear(self) -> None:
        """Forget all names."""
        self.claims.clear()
        self.past.clear()
