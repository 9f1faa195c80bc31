"""Converts values of any kind to plain data, bit for bit, so the values of two programs can be recorded and compared.

Plain data is the data that msgpack carries: None, bool, int, float, str, bytes, list and dict with str keys. Any other
value becomes a dict with a `kind`. A tensor keeps dtype, shape and bytes; a nested tensor its rows, layout and ragged
dimension; an object its type's name and its state. Two values are the same exactly if their plain data is, except for
the order of dicts, which nobody may rely on.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np

_MSGPACK_INT_BITS = 63


def plain(value: Any) -> Any:
    """Return a value as plain data.

    An object of an unknown type is represented by its `__getstate__`.
    """
    if value is None or (isinstance(value, bool | float | str | bytes) and type(value).__module__ == "builtins"):
        return value
    if type(value) is int:
        return value if value.bit_length() <= _MSGPACK_INT_BITS else {"kind": "int", "digits": str(value)}
    if type(value) is list:
        return [plain(item) for item in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {"kind": "dict", "items": {key: plain(item) for key, item in value.items()}}
    for convert in (_tensors, _arrays, _metadata, _containers):
        converted = convert(value)
        if converted is not None:
            return converted
    return _object(value)


def is_row(value: object) -> bool:
    """Whether plain data represents a tensor or an array: dtype, shape and bytes."""
    return isinstance(value, dict) and "dtype" in value and "data" in value


def _tensors(value: Any) -> dict[str, Any] | None:
    import torch
    from tensordict import TensorDictBase

    if isinstance(value, torch.Tensor):
        if not value.is_nested:
            return _tensor(value)
        ragged = getattr(value, "_ragged_idx", None)
        rows = [_tensor(row) for row in value.unbind()]
        return {"kind": "nested " + str(value.layout).removeprefix("torch."), "ragged dimension": ragged, "rows": rows}
    if isinstance(value, TensorDictBase):
        if _is_non_tensor(value):
            return _non_tensor(value)
        names = list(value.keys())
        fields = {name: plain(_leaf(value, name)) for name in names}
        return {"kind": "TensorDict", "size": list(value.batch_size), "fields": fields}
    return _non_tensor(value) if _is_non_tensor(value) else None


def _leaf(batch: Any, name: str) -> Any:
    """Return a field as stored: a TensorDict item unwraps values that are not tensors."""
    return batch._get_str(name, None)


def _is_non_tensor(value: Any) -> bool:
    from tensordict import NonTensorData, NonTensorStack

    return isinstance(value, NonTensorData | NonTensorStack)


def _non_tensor(value: Any) -> dict[str, Any]:
    from tensordict import NonTensorStack

    if isinstance(value, NonTensorStack):
        return {"kind": "NonTensorStack", "rows": [plain(item) for item in value.tolist()]}
    return {"kind": "NonTensorData", "size": list(value.batch_size), "value": plain(value.data)}


def _tensor(value: Any) -> dict[str, Any]:
    import torch

    whole = value.detach().cpu().contiguous().reshape(-1)
    data = whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    return {
        "kind": "tensor",
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "data": data,
    }


def _arrays(value: Any) -> dict[str, Any] | None:
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return {"kind": "object array", "shape": list(value.shape), "rows": [plain(item) for item in value.flat]}
        return {"kind": "array", "dtype": str(value.dtype), "shape": list(value.shape), "data": value.tobytes()}
    if isinstance(value, np.generic):
        return {"kind": "number", "dtype": str(value.dtype), "shape": [], "data": value.tobytes()}
    return None


def _metadata(value: Any) -> dict[str, Any] | None:
    """Return metadata of a batch without the sample numbers, which are specific to each system."""
    kind = type(value).__name__
    if kind == "KVBatchMeta":
        given = {name: plain(getattr(value, name)) for name in ("keys", "tags", "partition_id", "extra_info")}
        return {"kind": kind, **given, "fields": None if value.fields is None else list(value.fields)}
    if kind == "BatchMeta":
        return {
            "kind": kind,
            "size": value.size,
            "partition_ids": plain(list(value.partition_ids)),
            "fields": list(value.field_names),
            "ready": bool(value.is_ready),
            "custom_meta": plain([dict(row) for row in value.custom_meta]),
            "extra_info": plain(value.extra_info),
        }
    return None


def _containers(value: Any) -> dict[str, Any] | None:
    if isinstance(value, enum.Enum):
        return {"kind": _name(value), "name": value.name}
    if isinstance(value, Mapping):
        pairs = [[plain(key), plain(item)] for key, item in value.items()]
        return {"kind": f"{_name(value)} with any keys", "pairs": sorted(pairs, key=repr)}
    if isinstance(value, set | frozenset):
        return {"kind": _name(value), "items": sorted((plain(item) for item in value), key=repr)}
    if isinstance(value, list | tuple):
        return {"kind": _name(value), "items": [plain(item) for item in value]}
    if isinstance(value, str | bytes | int | float):
        return {"kind": _name(value), "value": repr(value)}
    return None


def _object(value: Any) -> dict[str, Any]:
    if type(value).__module__.startswith("PIL.") and hasattr(value, "tobytes"):
        return {"kind": "image", "mode": value.mode, "size": list(value.size), "data": value.tobytes()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        state: Any = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, type) or callable(value):
        return {"kind": "name", "value": f"{value.__module__}.{getattr(value, '__qualname__', type(value).__name__)}"}
    else:
        state = value.__getstate__()
    return {"kind": _name(value), "state": plain(state)}


def _name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
