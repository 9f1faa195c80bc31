"""Differences between two records of the same program: the call, the sample and the field, and both values.

The calls of a process are compared in order. If a process makes calls from several tasks at a time (`concurrent`),
each call is compared with one that has the same arguments. The number of calls of a polling loop varies, so of
consecutive identical polls only the last one counts.
"""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack

from compat.plain_values import is_row
from compat.recorder import entries

Entry = dict[str, Any]

SCENE = "scene "
"""Prefix of an entry that is a marker, not a call. It names the scene of the calls that follow and, as `purpose`,
the reason if they differ on purpose."""

TUPLES = "tuples stay tuples; TransferQueue turns them into lists"
"""Reason why a list in the first record may be a tuple in the second, at any place."""

RAGGED = "rows of equal length are ragged in the dimension that varies within their field; TransferQueue's in the first"
"""Reason why a nested tensor may have a different ragged dimension in the second record."""

_RAGGED_DIMENSION = "ragged dimension"
_SHOWN_CHARACTERS = 160
_POLLS = frozenset({"kv_list", "async_kv_list"})
_NOTHING = {"kind": "nothing"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference.

    Attributes:
        role: role of the process that made the call.
        call: name and number of the call, with shortened arguments.
        place: where in its arguments or its answer: sample, field.
        left: the value in the first record, shortened.
        right: the value in the second record, shortened.
        purpose: reason if the difference is on purpose; empty if it is unwanted.
    """

    role: str
    call: str
    place: str
    left: str
    right: str
    purpose: str = ""

    def __str__(self) -> str:
        return f"{self.role}: {self.call}\n    {self.place or 'whole'}\n      {self.left}\n      {self.right}"


def records(directory: Path) -> dict[str, list[Entry]]:
    """Return the calls recorded below a directory by role; processes of the same role are merged."""
    found: defaultdict[str, list[Entry]] = defaultdict(list)
    for path in sorted(directory.glob("*.msgpack")):
        found[path.name.split(".")[0]].extend(entries(path))
    return {role: sorted(calls, key=lambda entry: float(entry["at"])) for role, calls in found.items()}


def differences(
    left: Mapping[str, Sequence[Entry]], right: Mapping[str, Sequence[Entry]], *, concurrent: frozenset[str]
) -> Iterator[Difference]:
    """Yield the differences between two records; `concurrent` names the roles whose calls come in any order."""
    for role in sorted(left.keys() | right.keys()):
        pairs = _by_given if role in concurrent else _by_order
        calls = [list(_without_polls(record.get(role, ()))) for record in (left, right)]
        purpose = ""
        for number, (one, other) in enumerate(pairs(*calls), start=1):
            if one is not None and one["call"].startswith(SCENE):
                purpose = one["given"]["items"]["purpose"]
            for found in _of_call(role, number, one, other):
                yield replace(found, purpose=purpose) if purpose else found


def compared_count(record: Mapping[str, Sequence[Entry]]) -> int:
    """Return the number of compared calls of a record."""
    return sum(1 for calls in record.values() for _ in _without_polls(calls))


def _without_polls(calls: Sequence[Entry]) -> Iterator[Entry]:
    for entry, following in itertools.zip_longest(calls, calls[1:]):
        repeated = following is not None and entry["call"] in _POLLS and following["call"] == entry["call"]
        if not (repeated and entry["given"] == following["given"]):
            yield entry


def _by_order(left: list[Entry], right: list[Entry]) -> Iterator[tuple[Entry | None, Entry | None]]:
    for one, other in itertools.zip_longest(left, right):
        yield one, other
        if one is None or other is None or one["call"] != other["call"]:
            return  # the programs diverged: further differences mean nothing


def _by_given(left: list[Entry], right: list[Entry]) -> Iterator[tuple[Entry | None, Entry | None]]:
    waiting: defaultdict[bytes, list[Entry]] = defaultdict(list)
    for entry in right:
        waiting[_identity(entry)].append(entry)
    for entry in left:
        same = waiting[_identity(entry)]
        yield entry, same.pop(0) if same else None
    yield from ((None, entry) for rest in waiting.values() for entry in rest)


def _identity(entry: Entry) -> bytes:
    """Return the identity of a call: its name and its arguments except for the data."""
    given = entry["given"].get("items", {})
    return bytes(
        msgpack.packb([entry["call"], sorted((k, v) for k, v in given.items() if k not in ("fields", "data"))])
    )


def _of_call(role: str, number: int, left: Entry | None, right: Entry | None) -> Iterator[Difference]:
    named = left or right
    assert named is not None
    call = f"{number}. {named['call']}({_short_arguments(named['given'])})"
    if left is None or right is None or left["call"] != right["call"]:
        yield Difference(role=role, call=call, place="the call", left=_called(left), right=_called(right))
        return
    keys = _keys(named["given"])
    for part in ("given", "answer", "error"):
        for place, one, other in _unequal(left.get(part, _NOTHING), right.get(part, _NOTHING), part, keys):
            purpose = TUPLES if _is_tuple_of(other, one) else ""
            if (
                place.endswith(_RAGGED_DIMENSION) and one == 1 and isinstance(other, int)
            ):  # the other dimensions do not vary
                purpose = RAGGED
            yield Difference(role=role, call=call, place=place, left=_short(one), right=_short(other), purpose=purpose)


def _called(entry: Entry | None) -> str:
    return "no call" if entry is None else f"{entry['call']}({_short_arguments(entry['given'])})"


def _keys(given: Any) -> list[Any]:
    """Return the keys in the arguments of a call; its rows are named by them."""
    keys = given.get("items", {}).get("keys", []) if isinstance(given, dict) else []
    return keys if isinstance(keys, list) else [keys]


def _unequal(left: Any, right: Any, place: str, keys: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the smallest differing parts: place, left and right."""
    if is_row(left) and is_row(right):
        if left != right:
            yield place, left, right
    elif isinstance(left, dict) and isinstance(right, dict):
        if left.get("kind") != right.get("kind"):
            yield place, left, right
            return
        for name in sorted(left.keys() | right.keys()):
            inner = f"{place} {name}" if name not in ("items", "fields", "rows", "pairs", "state") else place
            yield from _unequal(left.get(name, _NOTHING), right.get(name, _NOTHING), inner, keys)
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        names = [f"key {key!r}" for key in keys] if len(keys) == len(left) else [f"[{n}]" for n in range(len(left))]
        for name, one, other in zip(names, left, right, strict=True):
            yield from _unequal(one, other, f"{place} {name}", keys)
    elif isinstance(left, float) and isinstance(right, float):
        if struct.pack("<d", left) != struct.pack("<d", right):
            yield place, left, right
    elif type(left) is not type(right) or left != right:
        yield place, left, right


def _is_tuple_of(value: Any, items: Any) -> bool:
    """Whether a value is a tuple that equals `items` once all tuples in it are turned into lists."""
    return isinstance(items, list) and isinstance(value, dict) and _with_lists(value) == items


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        if value.get("kind") == "tuple":
            return _with_lists(value["items"])
        return {name: _with_lists(item) for name, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list) else value


def _short_arguments(given: Any) -> str:
    arguments = given.get("items", {}) if isinstance(given, dict) else {}
    shown = {name: value for name, value in arguments.items() if name not in ("fields", "data", "tags")}
    return ", ".join(f"{name}={_short(value)}" for name, value in shown.items())


def _short(value: Any) -> str:
    if value == _NOTHING:
        return "nothing"
    if is_row(value):
        return f"{value['dtype']} {tuple(value['shape'])}: {_clip(_numbers(value))}"
    if isinstance(value, dict) and value.get("kind") == "dict":
        return _clip("{" + ", ".join(f"{name}: {_short(item)}" for name, item in value["items"].items()) + "}")
    return _clip(repr(value))


def _numbers(row: dict[str, Any]) -> str:
    import numpy as np

    try:
        return str(np.frombuffer(row["data"], dtype=row["dtype"]).tolist())
    except TypeError:  # dtypes that numpy lacks, such as bfloat16
        return repr(row["data"].hex())


def _clip(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
