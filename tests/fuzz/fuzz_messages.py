"""Strategies of messages made from their descriptors: a field or a method that is new is fuzzed without a word here."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("TQ_FUZZ_EXAMPLES", "30"))
"""Calls on each method; ten times as many bytes for each decoder."""

# Stand for what the service makes up, and are of its size: the bytes of a message are searched for them before it goes.
INCARNATION = b"<incarnation--->"
BOOT_ID = b"<boot-id------->"
PUT_ID = b"<put-id-------->"
OTHER_PUT_ID = b"<other-put-id-->"
FRESH_ID = b"<fresh--------->"
CLAIM_ID = b"claim-of-worker!"
KNOWN_IDS = [
    FRESH_ID,
    FRESH_ID,
    FRESH_ID,
    INCARNATION,
    BOOT_ID,
    PUT_ID,
    OTHER_PUT_ID,
    CLAIM_ID,
    bytes(16),
    b"",
    b"short",
]

NAMES = ["train", "train", "train", "other", "new", "", "x" * 400, "a\nb", "../../etc", "a/b", "nul\0", "é", "\u202e"]
FIELDS = ["input_ids", "score", "text", "reward", "", "x" * 300, "../x"]
TASKS = ["update_actor", "reward", "t", "", "x" * 300]
KEYS = ["k0", "k1", "k2", "k3", "n0", "n1", "", "x" * 2000]
SAMPLERS = [
    "",
    "sequential",
    "grpo_group_n",
    "rank_aware",
    "seqlen_balanced",
    "token_budget",
    "chosen",
    "packed",
    "os:system",
    "no",
]
COLUMNS = ["total_lengths", "version", "tag", "", "x" * 300]

WORDS: dict[str, Sequence[Any]] = {
    "partition_id": NAMES,
    "prefix": NAMES,
    "task_name": TASKS,
    "tasks": TASKS,
    "data_fields": FIELDS,
    "field_names": FIELDS,
    "FieldSpec.name": FIELDS,
    "MetaColumn.name": COLUMNS,
    "column": COLUMNS,
    "BatchedCall.method": ["GetMeta", "GetMeta", "AckClaim", "ReleaseClaim", "ExtendClaim", "Insert", "CallMany", ""],
    "policy": ["default", "", "x" * 300],
    "json_values": ["null", "[1]", '{"a": null}', "3", '"text"', "NaN", "", "[" * 40, "1e999", '"\\ud800"'],
    "keys": KEYS,
    "groups": ["g0", "g1", "g2", "", "x" * 300],
    "sampler": SAMPLERS,
    "dtype": ["int64", "float32", "bfloat16", "uint8", "", "int65", "object"],
    "storage_id": ["fuzzed", "other", "", "x" * 300],
    "address": ["", "127.0.0.1:1", "127.0.0.1", ":", "127.0.0.1:99999", "x" * 300],
    "directory": [
        "<directory>",
        "<directory>/new",
        "<directory>/file",
        "<directory>/a\nb",
        "<directory>/" + "x" * 300,
        "",
    ],
    # What ends by the clock would change the state after a refused call had nothing to do with it.
    "Duration.seconds": [0, 80_000, 80_000, 80_000, 80_000, 10**6, -1, 315_576_000_000, 315_576_000_001, -(2**63)],
    "Duration.nanos": [0, 0, 0, 0, -1, 10**9, -(2**31)],
}
INTEGERS = [0, 0, 1, 1, 2, 3, 4, 5, 8, 24, 32, 1000, -1, 2**31 - 1]
WIDE_INTEGERS = [*INTEGERS, 2**31, 2**62, 2**63 - 1, -(2**63)]

_LONG_RUN = re.compile(rb"\0{64,}")

_MOST_REPEATED = 4
_DEEPEST = 6


class Call(list[bytes]):
    """The messages of a call, as they are shown where a test fails: with `bytes(n)` for long runs of zeros."""

    def __repr__(self) -> str:
        return f"[{', '.join(map(_shown, self))}]"


def _shown(data: bytes) -> str:
    parts, end = [], 0
    for run in _LONG_RUN.finditer(data):
        parts += [repr(data[end : run.start()]), f"bytes({len(run[0])})"]
        end = run.end()
    return " + ".join([*parts, repr(data[end:])])


@cache
def messages(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Return random messages of a type: any field may be there, with values that fit and values that do not."""
    kind = GetMessageClass(descriptor)
    fields = [field for field in descriptor.fields if depth < _DEEPEST or field.message_type is None]

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message = kind()
        # Most fields, mostly: a message with a few of its fields hardly gets past the first check.
        shares = draw(st.lists(st.integers(0, 7), min_size=len(fields), max_size=len(fields)))
        for field, share in zip(fields, shares, strict=True):
            is_span = field.message_type is not None and field.message_type.name == "Duration"
            if share > (4 if is_span else 0):  # a lease is not for ranks, so that many calls would go no further
                fill(draw, message, field, depth)
        return message

    return build()


def fill(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int = 0) -> None:
    """Give a field a random value."""
    if field.is_repeated and is_map(field):
        entries = getattr(message, field.name)
        for key in draw(st.lists(st.sampled_from(["n_samples_per_prompt", "length_field", "no"]), max_size=2)):
            value = field.message_type.fields_by_name["value"]
            if value.message_type is None:
                entries[key] = draw(scalars(value))
            else:
                entries[key].CopyFrom(draw(messages(value.message_type, depth + 2)))
    elif field.message_type is not None:
        count = draw(st.integers(0, 2)) if field.is_repeated else 1
        for _ in range(count):
            value = draw(messages(field.message_type, depth + 1))
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                getattr(message, field.name).CopyFrom(value)
    elif field.is_repeated:
        del getattr(message, field.name)[:]
        getattr(message, field.name).extend(draw(st.lists(scalars(field), max_size=_MOST_REPEATED)))
    else:
        setattr(message, field.name, draw(scalars(field)))


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a map."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


@cache
def scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Return values of a field: those that its name calls for, and odd ones."""
    words = WORDS.get(f"{field.containing_type.name}.{field.name}") or WORDS.get(field.name)
    if words is not None:
        return st.sampled_from(words)
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_INT64:
            return st.sampled_from(WIDE_INTEGERS)
        case FieldDescriptor.CPPTYPE_INT32:
            return st.sampled_from(INTEGERS)
        case FieldDescriptor.CPPTYPE_UINT32 | FieldDescriptor.CPPTYPE_UINT64:
            return st.sampled_from([value for value in INTEGERS if value >= 0])
        case FieldDescriptor.CPPTYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.CPPTYPE_ENUM:
            return st.sampled_from([*(value.number for value in field.enum_type.values), 77])
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return st.floats()
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_STRING:
            return st.text(max_size=12)
    return st.sampled_from(KNOWN_IDS) if field.name.endswith(("_id", "_ids", "incarnation")) else _bytes_values()


def _bytes_values() -> st.SearchStrategy[bytes]:
    """Return frames, extents and the like: zeros of sizes that fit, little-endian integers, and anything."""
    extents = st.lists(st.sampled_from(WIDE_INTEGERS), max_size=4).map(
        lambda values: b"".join(value.to_bytes(8, "little", signed=True) for value in values)
    )
    return st.one_of(st.sampled_from([b"", bytes(24), bytes(32), bytes(8)]), extents, st.binary(max_size=40))


@st.composite
def changed(draw: st.DrawFn, message: Message) -> bytes:
    """Return a valid message with one to three of its fields, wherever they are, given another value or taken away."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(draw(st.integers(1, 3))):
        holder = draw(st.sampled_from(_holders(copy)))
        if not holder.DESCRIPTOR.fields:
            continue
        field = draw(st.sampled_from(list(holder.DESCRIPTOR.fields)))
        if draw(st.booleans()):
            fill(draw, holder, field)
        else:
            holder.ClearField(field.name)
    return copy.SerializeToString()


def _holders(message: Message) -> list[Message]:
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is None or is_map(field):
            continue
        for child in value if field.is_repeated else (value,):
            found += _holders(child)
    return found


@st.composite
def garbled(draw: st.DrawFn, data: bytes) -> bytes:
    """Return bytes with some of them changed, dropped or added."""
    changing = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(changing)))
        match draw(st.integers(0, 3)):
            case 0 if place < len(changing):
                changing[place] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del changing[place : place + draw(st.integers(1, 8))]
            case 2:
                del changing[place:]
            case _:
                changing[place:place] = draw(st.binary(min_size=1, max_size=4))
    return bytes(changing)
