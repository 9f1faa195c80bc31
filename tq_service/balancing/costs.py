"""What a sample costs to train on, as a function of its length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
CostFunction = Callable[[Int64s], NDArray[Any]]
CostName = Literal["tokens", "attention"]
Cost = CostName | CostFunction

# Costs that are no integers are counted in steps of the largest one divided by this.
_STEPS = 2**40
_LARGEST_TOTAL = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """Cost of a sequence of L tokens, `linear * L + quadratic * L**2`.

    The linear part stands for the matrix products, which cost the same for every token, the quadratic part for the
    attention of every token to those before it. The defaults are the ratio for a hidden size of 4,096 that balancing
    code of the field uses: the two parts are equal at 24,576 tokens.

    Attributes:
        linear: cost of a token.
        quadratic: cost of a pair of tokens.
    """

    linear: float = 24_576
    quadratic: float = 1

    def __post_init__(self) -> None:
        if not (self.linear >= 0 and self.quadratic >= 0 and 0 < self.linear + self.quadratic < float("inf")):
            raise ValueError(
                f"got linear={self.linear}, quadratic={self.quadratic}, expected finite numbers of at least 0, one of "
                "them above 0"
            )

    def __call__(self, lengths: Int64s) -> NDArray[np.float64]:
        """Return the costs `(n,)` of sequences of these lengths `(n,)`."""
        exact = lengths.astype(np.float64)
        return np.asarray(exact * (self.linear + self.quadratic * exact), np.float64)


def token_cost(lengths: Int64s) -> Int64s:
    """Return the lengths themselves: every token costs the same."""
    return lengths


_BY_NAME: Mapping[str, CostFunction] = {"tokens": token_cost, "attention": AttentionCost()}


def get_costs(lengths: Int64s, cost: Cost | None = None) -> Int64s:
    """Return what samples of these lengths cost, as integers whose ratios are those of the cost function.

    Args:
        lengths: token counts, `(n,)`.
        cost: "tokens", "attention" (`AttentionCost` with its defaults), or a function from lengths `(n,)` to costs
            `(n,)`, integers or not; None: tokens.

    Returns:
        Costs `(n,)`; those that are no integers are scaled so that the largest is 2**40, and rounded.

    Raises:
        ValueError: the name is unknown, or the function returns another shape, no numbers, or numbers that are
            negative, not finite, or too large to add up exactly.
    """
    function = _cost_function(cost)
    costs = np.asarray(function(lengths))
    if costs.shape != lengths.shape:
        raise ValueError(f"cost: got an array of shape {costs.shape} for {lengths.size} lengths, expected one each")
    if costs.dtype.kind not in "iuf":
        raise ValueError(f"cost: got values of dtype {costs.dtype}, expected integers or floats")
    if not costs.size:
        return np.zeros(0, np.int64)
    is_bad = ~np.isfinite(costs) | (costs < 0)
    if is_bad.any():
        at = int(is_bad.argmax())
        raise ValueError(f"cost: got {costs[at]} for a length of {lengths[at]}, expected a finite number of at least 0")
    if costs.dtype.kind == "f":
        largest = float(costs.max())
        costs = np.rint(costs * (_STEPS / largest)) if largest > 0 else costs
    if float(costs.sum(dtype=np.float64)) >= _LARGEST_TOTAL:
        raise ValueError(f"cost: got a total of 2**62 or more, expected less; the largest is {costs.max()}")
    return costs.astype(np.int64)


def check_cost_name(cost: str) -> None:
    """Raise ValueError where there is no cost function of this name."""
    if cost not in _BY_NAME:
        raise ValueError(f"cost: got {cost!r}, expected one of {', '.join(map(repr, _BY_NAME))}")


def _cost_function(cost: Cost | None) -> CostFunction:
    if cost is None:
        return token_cost
    if isinstance(cost, str):
        check_cost_name(cost)
        return _BY_NAME[cost]
    if not callable(cost):
        raise ValueError(f"cost: got {cost!r}, expected a name or a function of lengths")
    return cost
