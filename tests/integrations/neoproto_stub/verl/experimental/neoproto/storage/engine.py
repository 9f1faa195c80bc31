"""What the adapter needs of verl, whose releases lack NeoProto: the names, fields and contracts of a ref."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

_OPERATIONS = {
    "TO": lambda value, keywords: value.to(**keywords),
    "UNSQUEEZE": lambda value, dim: value.unsqueeze(dim),
    "PAD": lambda value, pad, fill: torch.nn.functional.pad(value, pad, value=fill),
}


@dataclass(eq=False)
class Ref:
    backend: str
    uid: str
    dataptr: Any
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    slice_spec: tuple[Any, ...] | None = None
    apply_funcs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.slice_spec is None and self.shape is not None:
            self.slice_spec = tuple(slice(0, length) for length in self.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and (self.backend, self.uid) == (other.backend, other.uid)

    def __hash__(self) -> int:
        return hash((self.backend, self.uid, repr(self.slice_spec)))

    def with_spec(self, *dims: Any) -> Ref:
        """Return the ref with other selectors; verl composes them with those that are there."""
        return replace(self, slice_spec=dims, apply_funcs=list(self.apply_funcs))

    def with_operation(self, *operation: Any) -> Ref:
        return replace(self, apply_funcs=[*self.apply_funcs, operation])

    def apply_ops(self, value: Any) -> Any:
        for name, *arguments in self.apply_funcs:
            value = _OPERATIONS[name](value, *arguments)
        return value

    def release(self) -> None:
        from verl.experimental.neoproto.storage.default import get_engine_for_backend

        get_engine_for_backend(self.backend).release(self)
