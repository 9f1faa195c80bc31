"""Destinations for fetched data instead of new host memory: a device or the caller's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tq_service.errors import FieldMismatchError, InvalidArgumentError
from tq_service.schema import FieldSpec, Layout, ReadLayout
from tq_service.wire.columns import (
    ColumnShape,
    dtype_name,
    is_on_device,
    is_tensor,
    subclass_problem,
    tensor_bytes,
)
from tq_service.wire.device import copy_on_device, find_device
from tq_service.wire.host_memory import BLOCKS
from tq_service.wire.mapping import Bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Landing:
    """The destinations of fetched fields.

    Attributes:
        device: device for fields that are not in `out`, or None for the CPU.
        out: a dict that maps fields to the caller's tensors to fill.
    """

    device: torch.device | None
    out: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, device: Any, out: Any) -> Landing | None:
        """Return the destinations that the arguments select, or None if all data is received in new host memory.

        Raises:
            InvalidArgumentError: the device does not exist, or a tensor in `out` cannot be filled.
        """
        found = find_device(device)
        targets = {} if out is None else dict(out.items())
        for name, target in targets.items():
            problem = (
                f"a {type(target).__name__}; expected a tensor"
                if not is_tensor(target)
                else "a nested tensor; expected a plain tensor"
                if target.is_nested
                else "not contiguous; expected a contiguous tensor"
                if not target.is_contiguous()
                else subclass_problem(target)
            )
            if problem:
                raise InvalidArgumentError(f"out[{name!r}] is {problem}", field="out", metadata={"field_name": name})
        return cls(found, targets) if found is not None or targets else None

    def check(self, specs: Sequence[FieldSpec], row_count: int, layout: ReadLayout | None) -> None:
        """Check that the tensors in `out` can receive `row_count` rows of the fetched fields.

        Raises:
            InvalidArgumentError: a field is not among the fetched fields, or is not dense.
            FieldMismatchError: a tensor has a different dtype or shape.
        """
        fetched = {spec.name: spec for spec in specs}
        for name, target in self.out.items():
            spec = fetched.get(name)
            if spec is None:
                raise InvalidArgumentError(
                    f"out has field {name!r}, which is not fetched; expected any of {', '.join(map(repr, fetched))}",
                    field="out",
                    metadata={"field_name": name},
                )
            if spec.layout is not Layout.DENSE or spec.row_shape is None or layout == "jagged":
                raise InvalidArgumentError(
                    f"out has field {name!r} ({spec.describe()}); expected only dense fields. Omit the field from out, "
                    "and read it from the result",
                    field="out",
                    metadata={"field_name": name},
                )
            expected = f"{spec.dtype} {[row_count, *spec.row_shape]}"
            got = f"{dtype_name(target.dtype, f'out[{name!r}]')} {list(target.shape)}"
            if got != expected:
                raise FieldMismatchError(
                    f"out[{name!r}] is {got}; expected {expected}. Create the tensor with torch.empty",
                    field="out",
                    metadata={"field_name": name, "got": got, "expected": expected},
                )

    def device_of(self, column: ColumnShape) -> torch.device | None:
        """Return the device to which a column is copied, or None if it stays on the CPU, as all object columns do."""
        target = self.out.get(column.spec.name)
        if target is not None:
            return target.device if is_on_device(target) else None
        return None if column.spec.layout is Layout.OBJECT else self.device

    def place(self, columns: Sequence[ColumnShape]) -> list[Bytes]:
        """Return the host memory that will receive each column."""
        going = {column.spec.name: device for column in columns if (device := self.device_of(column)) is not None}
        first = next(iter(going.values()), None)
        sizes = [column.value_bytes for column in columns if column.spec.name in going]
        blocks = iter([] if first is None else BLOCKS.take_columns(sizes, first))
        return [next(blocks) if column.spec.name in going else self._of_host(column) for column in columns]

    def _of_host(self, column: ColumnShape) -> Bytes:
        target = self.out.get(column.spec.name)
        takes_all = target is not None and not is_on_device(target) and target.nbytes == column.value_bytes
        if target is None or not takes_all or not target.nbytes:
            return BLOCKS.take(column.value_bytes)
        return np.frombuffer(tensor_bytes(target), np.uint8)

    def fill(self, data: dict[str, Any]) -> None:
        """Fill the caller's tensors with the decoded columns in `data`, and replace the columns with the tensors."""
        for name, target in self.out.items():
            values = data[name]
            if is_on_device(target):
                copy_on_device(target, values)
            elif values.data_ptr() != target.data_ptr():
                target.detach().copy_(values)
            data[name] = target
