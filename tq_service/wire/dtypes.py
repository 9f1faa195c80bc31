"""Dtypes by torch's names, for torch and for numpy, and tensors as plain bytes.

torch is never imported by what only encodes: without torch in the process there is no tensor to encode.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tq_service.errors import InvalidArgumentError
from tq_service.schema import DTYPE_SIZES, LARGEST_EXACT

Bytes = NDArray[np.uint8]

_NUMPY_NAMES: Final = frozenset({
    "bool", "uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32",
    "uint64", "int64", "float64", "complex64", "complex128",
})  # fmt: skip


_CONVERTED_AT_ONCE: Final = 1 << 16  # numpy keeps other threads from running meanwhile
_NUMBERS: Final[dict[type, Any]] = {bool: np.bool_, int: np.int64, float: np.float64}


def loaded_torch() -> ModuleType | None:
    """Return torch where this process has imported it; nothing can be a tensor otherwise."""
    torch = sys.modules.get("torch")
    # Where another thread is still importing it, it has no Tensor yet, so there is no tensor.
    return torch if hasattr(torch, "Tensor") else None


def has_torch() -> bool:
    """Whether torch is installed, without importing it."""
    return loaded_torch() is not None or find_spec("torch") is not None


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor."""
    return is_tensor_type(type(value))


def is_tensor_type(kind: type) -> bool:
    """Whether values of this type are torch tensors."""
    torch = loaded_torch()
    return torch is not None and issubclass(kind, torch.Tensor)


def subclass_problem(tensor: Any) -> str:
    """Return why the values of a tensor cannot be read here; empty if they can.

    Subclasses that dispatch torch's operations themselves wrap other tensors, or none, and have no bytes of their own.
    """
    kind = type(tensor)
    torch = sys.modules["torch"]
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or tensor.is_nested:
        return ""
    if hasattr(tensor, "full_tensor"):
        return "a DTensor, whose values are spread over ranks; put its full_tensor(), which all ranks of its mesh call"
    if kind.__name__ == "FakeTensor":
        return "a FakeTensor, which has no values; put a tensor that was computed"
    return f"a {kind.__qualname__}, which wraps its values; put the plain tensor in it"


def dtype_name(dtype: Any, what: str) -> str:
    """Return the name of a dtype of torch or numpy, whatever its byte order; `what` names its owner in the error.

    Raises:
        InvalidArgumentError: the dtype cannot be stored: quantized, smaller than a byte, or no number.
    """
    name = dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")
    if name not in DTYPE_SIZES:
        raise InvalidArgumentError(
            f"{what} has dtype {name!r}, which cannot be stored; convert it to one of {', '.join(sorted(DTYPE_SIZES))}"
        )
    return name


def exact_numbers(values: Sequence[Any], kinds: set[type]) -> NDArray[Any] | None:
    """Return bools, integers or floats of Python as an array that holds each exactly, None where none does.

    Args:
        values: the numbers, or whatever.
        kinds: the types of all of them.
    """
    if kinds == {int, float} and not any(type(value) is int and abs(value) > LARGEST_EXACT for value in values):
        kinds = {float}
    dtype = _NUMBERS.get(*kinds) if len(kinds) == 1 else None
    try:
        if dtype is None or len(values) <= _CONVERTED_AT_ONCE:
            return None if dtype is None else np.array(values, dtype)
        starts = range(0, len(values), _CONVERTED_AT_ONCE)
        return np.concatenate([np.array(values[start : start + _CONVERTED_AT_ONCE], dtype) for start in starts])
    except OverflowError:
        return None


def tensor_bytes(tensor: Any) -> memoryview:
    """Return the values of a tensor as bytes in row-major order: a view where it is contiguous and on the CPU."""
    plain = tensor.detach()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    plain = plain.resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return memoryview(b"")
    torch = sys.modules["torch"]
    # Not reshape: a single value counts as contiguous with any stride, which view does not accept.
    view: memoryview = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
    return view


def array_bytes(array: NDArray[Any]) -> memoryview:
    """Return the values of an array as little-endian bytes in row-major order: a view where they are so already."""
    plain = np.ascontiguousarray(array)
    if plain.dtype.byteorder == ">" or (plain.dtype.byteorder == "=" and sys.byteorder == "big"):
        plain = plain.astype(plain.dtype.newbyteorder("<"))
    if not plain.size:
        return memoryview(b"")
    return plain.reshape(-1).view(np.uint8).data


def writable_bytes(buffer: Bytes) -> Bytes:
    """Return bytes that are writable and 16-byte aligned: the same where they are so already, else a copy."""
    return buffer if buffer.flags.writeable and not buffer.ctypes.data % 16 else buffer.copy()


def make_values(values: Bytes, dtype: str, shape: tuple[int, ...], *, as_torch: bool) -> Any:
    """Return a tensor, or a numpy array, that shares writable bytes.

    Raises:
        InvalidArgumentError: only torch has the dtype, or this torch is too old to have it.
    """
    if not as_torch:
        if dtype not in _NUMPY_NAMES:
            raise InvalidArgumentError(
                f"dtype {dtype!r} exists in torch only, and torch is not used here; install tq-service[data] to read it"
            )
        return values.view(dtype).reshape(shape)
    import torch  # noqa: PLC0415  (torch is optional and slow to import)

    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise InvalidArgumentError(f"dtype {dtype!r} is unknown to torch {torch.__version__}; update torch")
    if not values.size:
        return torch.empty(shape, dtype=torch_dtype)
    return torch.from_numpy(values).view(torch_dtype).reshape(shape)
