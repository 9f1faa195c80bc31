"""What callers get: tensors, nested tensors and lists that share the received bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.schema import Encoding, Layout
from tq_service.wire.columns import Bytes, ColumnShape, has_torch, make_values, offsets_of, row_shapes
from tq_service.wire.metadata import ENCODINGS
from tq_service.wire.objects import decode_object, no_collection

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPattern:
    """The row lengths of jagged columns; fields with the same lengths share one.

    Attributes:
        offsets: `(n + 1,)`, where rows begin and end; nested tensors of one pattern share this tensor.
        min_length: length of the shortest row, 0 where there are no rows.
        max_length: length of the longest row, 0 where there are no rows. Padding goes by it: of a nested tensor that
            does not know it, torch pads all rows to the size of dimension 0 of its values.
    """

    offsets: torch.Tensor
    min_length: int
    max_length: int

    @classmethod
    def of_offsets(cls, offsets: torch.Tensor) -> RowPattern:
        """Return the pattern of an offsets tensor; one on another device than the CPU is waited for."""
        return cls._of(offsets, np.diff(offsets.detach().cpu().numpy()))

    @classmethod
    def of_lengths(
        cls, lengths: NDArray[np.int64], *, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> RowPattern:
        """Return the pattern of rows of these lengths `(n,)`; its offsets are int64 on the CPU by default."""
        import torch  # noqa: PLC0415  (torch is optional and slow to import)

        return cls._of(torch.from_numpy(offsets_of(lengths)).to(device=device, dtype=dtype), lengths)

    @classmethod
    def _of(cls, offsets: torch.Tensor, lengths: NDArray[np.int64]) -> RowPattern:
        longest = int(lengths.max(initial=0))
        return cls(offsets=offsets, min_length=int(lengths.min(initial=longest)), max_length=longest)

    def map_offsets(self, function: Callable[[torch.Tensor], torch.Tensor]) -> RowPattern:
        """Return the same pattern with `function` applied to its offsets."""
        return replace(self, offsets=function(self.offsets))

    def nested(self, values: torch.Tensor, ragged_dim: int) -> torch.Tensor:
        """Return the nested tensor of some rows, which can be padded.

        Args:
            values: the rows one after the other along dimension `ragged_dim - 1`.
            ragged_dim: the ragged dimension of the nested tensor, from 1.
        """
        import torch  # noqa: PLC0415  (torch is optional and slow to import)

        _hide_torch_notice()
        return torch.nested.nested_tensor_from_jagged(
            values, self.offsets, jagged_dim=ragged_dim, min_seqlen=self.min_length, max_seqlen=self.max_length
        )


@cache
def _hide_torch_notice() -> None:
    """Drop what torch logs when it makes the first nested tensor of a process: advice to its own developers."""

    def is_worth_showing(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("is_fx_tracing will return true")

    logging.getLogger("torch.fx._symbolic_trace").addFilter(is_worth_showing)


def decode_columns(
    columns: Sequence[ColumnShape], buffers: Sequence[Bytes], *, as_torch: bool | None = None
) -> dict[str, Any]:
    """Return the values of columns by field name.

    Args:
        columns: the headers.
        buffers: the bytes of each column's values; tensors share them where they are writable and aligned.
        as_torch: whether to make tensors, else numpy arrays; None: where torch is installed.

    Returns:
        Dense: a tensor or array `(n, ...)`. Jagged: with one ragged dimension a nested tensor (fields with the same
        extents share one offsets tensor), with several a list of tensors; a list of arrays without torch. Object: a
        list.

    Raises:
        InvalidArgumentError: bytes and headers do not agree, an object is garbled, or a dtype needs torch.
    """
    decoder = _Decoder(as_torch=has_torch() if as_torch is None else as_torch)
    return {column.spec.name: decoder.decode(column, buffer) for column, buffer in zip(columns, buffers, strict=True)}


def to_tensordict(columns: Mapping[str, Any], row_count: int) -> Any:
    """Return decoded columns as a TensorDict of batch size `[row_count]`; lists stay lists when read from it."""
    from tensordict import TensorDict  # noqa: PLC0415  (optional, slow to import)

    fields = {name: object_stack(values) if isinstance(values, list) else values for name, values in columns.items()}
    return TensorDict(fields, batch_size=[row_count])


def object_stack(rows: Sequence[Any]) -> Any:
    """Return rows of objects as a TensorDict holds them, none included: tensordict 0.10 knows no empty stack."""
    from tensordict import NonTensorData, NonTensorStack  # noqa: PLC0415  (optional, slow to import)

    if not rows:
        return NonTensorData([], batch_size=[0])
    with no_collection():
        return NonTensorStack(*(NonTensorData(row) for row in rows))


class _Decoder:
    """Makes values of columns; keeps the patterns it made, so that fields cut alike share one offsets tensor."""

    def __init__(self, *, as_torch: bool) -> None:
        self._as_torch = as_torch
        self._object_decoders: dict[Encoding | None, Callable[[memoryview], Any]] = {
            Encoding.TEXT: partial(str, encoding="utf-8"),
            Encoding.BYTES: bytes,
            Encoding.MSGPACK: partial(decode_object, as_torch=as_torch),
        }
        self._patterns: dict[bytes, RowPattern] = {}

    def decode(self, column: ColumnShape, buffer: Bytes) -> Any:
        if len(buffer) != column.value_bytes:
            raise InvalidArgumentError(
                f"field {column.spec.name!r} has {len(buffer)} bytes, its header says {column.value_bytes}"
            )
        if column.extents is None:
            shape = (column.row_count, *(column.spec.row_shape or ()))
            return make_values(buffer, column.spec.dtype, shape, as_torch=self._as_torch)
        if column.spec.layout is Layout.OBJECT:
            return self._decode_objects(column, buffer.data)
        ragged_dims = column.spec.ragged_dims
        if not self._as_torch or len(ragged_dims) != 1:
            return self._decode_rows(column, buffer)
        return self._decode_nested(column, column.extents[:, 0], buffer, ragged_dims[0])

    def _decode_objects(self, column: ColumnShape, buffer: memoryview) -> list[Any]:
        offsets, spec = column.row_offsets(), column.spec
        if spec.encoding is None and column.extents is not None:
            decoders = [self._object_decoders[ENCODINGS.decode(number)] for number in column.extents[:, 1].tolist()]
        else:
            decoders = [self._object_decoders[spec.encoding]] * column.row_count
        rows: list[Any] = []
        try:
            with no_collection():
                for decode, (start, end) in zip(decoders, pairwise(offsets.tolist()), strict=True):
                    rows.append(decode(buffer[start:end]))
        except (InvalidArgumentError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(
                f"row {len(rows)} of field {spec.name!r} cannot be read: {error}",
                field="columns",
                metadata={"row": str(len(rows)), "field_name": spec.name},
            ) from None
        return rows

    def _decode_rows(self, column: ColumnShape, values: Bytes) -> list[Any]:
        """Return each row of a jagged column, all on the shared bytes."""
        flat = make_values(
            values, column.spec.dtype, (column.value_bytes // column.spec.itemsize,), as_torch=self._as_torch
        )
        bounds = (column.row_offsets() // column.spec.itemsize).tolist()
        shapes = row_shapes(column.spec, column.extents, column.row_count).tolist()
        return [flat[start:end].reshape(shape) for (start, end), shape in zip(pairwise(bounds), shapes, strict=True)]

    def _decode_nested(self, column: ColumnShape, lengths: NDArray[np.int64], values: Bytes, ragged_dim: int) -> Any:
        import torch  # noqa: PLC0415  (torch is optional and slow to import)

        row_shape = list(column.spec.row_shape or ())
        row_shape[ragged_dim] = int(lengths.sum())
        if ragged_dim == 0 or column.value_bytes == 0:
            packed = make_values(values, column.spec.dtype, tuple(row_shape), as_torch=self._as_torch)
        else:
            packed = torch.cat(self._decode_rows(column, values), dim=ragged_dim)
        key = lengths.tobytes()
        if key not in self._patterns:
            self._patterns[key] = RowPattern.of_lengths(lengths)
        return self._patterns[key].nested(packed, ragged_dim + 1)
