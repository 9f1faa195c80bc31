"""Whether values are encoded, or made of what came, sooner than a thread could be asked to do it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from tq_service.wire.dtypes import is_tensor

_MOST_VALUES: Final = 128  # looked at, and encoded, in about the time that a thread takes to begin
_BYTES_A_VALUE: Final = 4096  # copied in about the time that a value takes


def are_light(values: Iterable[Any]) -> bool:
    """Whether little is to be done for values, of which only a few are looked at."""
    return _left_after(values, _MOST_VALUES) > 0


def answer_weight(value_count: int, value_bytes: int) -> range:
    """Return what weighs as much as values of so many bytes that were received; more if a library is imported first."""
    is_ready = "tensordict" in sys.modules or not _is_installed("tensordict")
    return range(value_count + value_bytes // _BYTES_A_VALUE if is_ready else _MOST_VALUES)


@cache
def _is_installed(name: str) -> bool:
    return find_spec(name) is not None


def _left_after(values: Iterable[Any], left: int) -> int:
    """Return how many values more may be looked at after these; 0 or less if there are too many."""
    for value in values:
        left -= 1 + _copied_bytes(value) // _BYTES_A_VALUE
        if left > 0 and hasattr(value, "batch_size"):  # of tensordict: columns, or one value for each row
            is_columns = type(value).__name__ == "TensorDict"
            left = _left_after(value.values(), left) if is_columns else left - math.prod(value.batch_size)
        elif left > 0 and isinstance(value, Mapping):
            left = _left_after(value.values(), left - len(value) // 2)
        elif left > 0 and _is_list(value):
            left = _left_after(value, left) if len(value) < left else 0
        if left <= 0:
            break
    return left


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes | bytearray | memoryview)


def _copied_bytes(value: Any) -> int:
    """Return the bytes of a value that are copied to encode it, at least; those on a device are waited for."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, np.ndarray):
        is_view = value.flags.c_contiguous and value.dtype.kind not in "OUST"
        return 0 if is_view else value.size * max(value.itemsize, _BYTES_A_VALUE if value.dtype.kind in "OUST" else 1)
    if not is_tensor(value):
        return 0
    if value.device.type != "cpu":
        return _MOST_VALUES * _BYTES_A_VALUE
    return 0 if not value.is_nested and value.is_contiguous() else value.numel() * value.element_size()
