"""Clients in other languages are written from docs/protocol.md: its bytes, tables and numbers are those of the code."""

from __future__ import annotations

import contextlib
import re
import socket
import unicodedata
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from one_object import encode_object

from tq_service.client.transport import MAX_MESSAGE_BYTES
from tq_service.config import load_settings
from tq_service.dataplane.bulk.connection import BulkConnection
from tq_service.samplers import SamplerRegistry
from tq_service.schema import DTYPE_SIZES, Encoding
from tq_service.server.rpc.methods import METHODS
from tq_service.serving.history import MOST_GONE_ROWS
from tq_service.state.plan import BatchSpec
from tq_service.v1 import commit_pb2, controller_service_pb2, metadata_pb2, storage_service_pb2
from tq_service.wire.columns import BULK_BYTES, Column, encode_header, extents_as, merge_specs
from tq_service.wire.connection import CONNECTION_OPTIONS, ROLES
from tq_service.wire.encoding import encode_columns
from tq_service.wire.metadata import decode_meta_columns, meta_columns_to_rows
from tq_service.wire.objects import decode_object

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
TEXT = " ".join(PAGE.split())
HEX = r"(?:[0-9a-f]{2} )*[0-9a-f]{2}"
FENCES: list[tuple[str, str]] = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", PAGE, re.DOTALL | re.MULTILINE)
BLOCKS = [block for language, block in FENCES if not language]


def section(name: str) -> str:
    """Return what stands below a heading."""
    return PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def rows_of(table_head: str) -> list[list[str]]:
    """Return the cells of a table of the page."""
    table = PAGE.partition(table_head)[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert rows
    return rows


# Bytes


def block_of(values: bytes, extents: bytes = b"") -> str:
    """Return a column as the page shows it."""
    return f"values   {values.hex(' ')}\n" + (f"extents  {extents.hex(' ')}\n" if extents else "")


def shown(column: Column) -> str:
    return block_of(b"".join(column.chunks), encode_header(column).extents)


def of_several(*columns: Column) -> str:
    """Return what a get of the rows of several puts answers."""
    merged = merge_specs([column.spec for column in columns])
    extents = [extents_as(merged, column.spec, column.extents, column.row_count) for column in columns]
    values = b"".join(chain.from_iterable(column.chunks for column in columns))
    return block_of(values, np.concatenate(extents).astype("<i8").tobytes())  # type: ignore[arg-type]


def column(rows: Any) -> Column:
    (encoded,) = encode_columns({"x": rows})
    return encoded


COLUMNS = {
    "dense": shown(column(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))),
    "jagged": shown(column([torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)])),
    "jagged in two dimensions": shown(column([np.array([[1, 2], [3, 4]], np.uint8), np.array([[5]], np.uint8)])),
    "text": shown(column(["hi", "\N{LATIN SMALL LETTER E WITH ACUTE}"])),
    "msgpack": shown(column([None, {"a": 1}])),
    "two encodings": of_several(column(["hello"]), column([None, {"a": 1}])),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_shown_as_they_travel(name: str) -> None:
    assert COLUMNS[name] in BLOCKS


EXTENSIONS = {
    expression.strip(): bytes.fromhex(shown)
    for expression, shown in re.findall(rf"^(\S.*?)  +({HEX})$", section("msgpack"), re.MULTILINE)
}


@pytest.mark.parametrize("expression", EXTENSIONS)
def test_objects_are_shown_as_they_travel(expression: str) -> None:
    value = eval(expression, {"np": np, "torch": torch})
    assert encode_object(value) == EXTENSIONS[expression]
    back = decode_object(EXTENSIONS[expression])
    assert type(back) is type(value)
    assert getattr(back, "dtype", None) == getattr(value, "dtype", None)
    assert np.array_equal(back, value)


def test_all_types_of_objects_but_codecs_are_shown() -> None:
    first = {0xC7: 2, 0xC8: 3, 0xD4: 1, 0xD5: 1, 0xD6: 1, 0xD7: 1, 0xD8: 1}  # where the type stands
    assert {data[first[data[0]]] for data in EXTENSIONS.values()} == set(range(1, 10))
    listed = [row[0] for row in rows_of("| type | value | payload |")]
    assert {int(each) for each in re.findall(r"\d+", " ".join(listed))} == set(range(1, 11))


def test_small_blocks_are_right() -> None:
    message = metadata_pb2.MetaColumn(name="c", kinds=bytes([1, 0, 2, 3]), json_values=["null"])
    message.int64_values.values.append(7)
    (read,) = decode_meta_columns([message], 4)
    assert meta_columns_to_rows([read], 4) == [{"c": 7}, {}, {"c": None}, {}]
    assert read.removed is not None
    assert read.removed.tolist() == [False, False, False, True]
    assert f"kinds    {message.kinds.hex(' ')}\n" in BLOCKS
    produced = np.packbits([True, False, True], bitorder="little").tobytes()
    assert f"produced {produced.hex(' ')}\n" in BLOCKS


def test_no_block_of_bytes_is_unknown() -> None:
    known = {*COLUMNS.values(), *(block for block in BLOCKS if block.startswith(("kinds ", "produced ")))}
    others = [block for block in BLOCKS if block not in known and re.search(rf" {HEX}$", block, re.MULTILINE)]
    assert len(others) == 1
    assert len(others[0].splitlines()) == len(EXTENSIONS)


# Tables


def test_dtypes_are_complete() -> None:
    listed = {
        name: int(size)
        for names, size in rows_of("| `FieldSpec.dtype` | bytes each |")
        for name in re.findall(r"`(\w+)`", names)
    }
    assert listed == DTYPE_SIZES
    encodings = [row[0].strip("`") for row in rows_of("| `encoding` | a row is | checked |")]
    assert sorted(encodings) == sorted(f"ENCODING_{each.name}" for each in Encoding)


def test_roles_are_those_of_the_methods() -> None:
    listed = {role.strip("`"): sorted(re.findall(r"\w+", calls)) for role, calls in rows_of("| role | calls |")}
    public = {name: method for name, method in METHODS.items() if name.startswith("/tq_service.v1.")}
    everybody = frozenset(ROLES)
    expected: dict[str, list[str]] = {role: [] for role in (*ROLES, "any")}
    for method in public.values():
        for role in {"any"} if method.roles == everybody else method.roles - {"service"}:
            expected[role].append(method.short_name)
    del expected["service"]
    assert listed == {role: sorted(names) for role, names in expected.items()}


def test_reasons_of_what_to_do_are_known_and_said_of_methods_that_are_there() -> None:
    reasons = set(re.findall(r"^\| ([A-Z_]+) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE))
    methods = {method.short_name for method in METHODS.values()}
    for names, origin, advice in rows_of("| reason | from | what to do |"):
        assert set(re.findall(r"[A-Z_]{4,}", names)) <= reasons
        assert origin in {"all", "calls that wait"} or set(re.findall(r"[A-Z]\w+", origin)) <= methods
        assert advice


def test_each_reason_that_a_client_can_get_says_what_to_do() -> None:
    advised = {
        reason
        for names, _, _ in rows_of("| reason | from | what to do |")
        for reason in re.findall(r"[A-Z_]{4,}", names)
    }
    errors = (ROOT / "docs" / "errors.md").read_text()
    made = {reason for reason, origin in re.findall(r"^\| ([A-Z_]+) \| [A-Z_]+ \| ([\w, ]+) \|", errors, re.MULTILINE)
            if "service" in origin.split(", ")}  # fmt: skip
    assert len(made) > 40
    assert advised == made


def test_options_of_samplers_are_those_of_the_registry() -> None:
    listed = {info.name: info for info in SamplerRegistry().describe()}
    assert {name.split("`")[1] for name, _, _ in rows_of("| `sampler` | a batch is | `batch_size` |")} == listed.keys()
    said: set[tuple[str, str, str, str]] = set()
    for option, samplers, takes, default, meaning in rows_of("| option | of | takes | default | meaning |"):
        names = set(re.findall(r"`(\w+)`", samplers))
        for name in listed.keys() - names if samplers.startswith("all but") else names:
            said.add((name, option.strip("`"), takes, default.strip("`")))
        assert meaning
    options = {(info.name, option) for info in listed.values() for option in info.options}
    assert said == {
        (name, option.name, option.type, "required" if option.default_json is None else option.default_json)
        for name, option in options
    }


def test_arguments_that_ranks_give_alike_are_those_that_are_compared() -> None:
    (listed,) = re.findall(r"All ranks of a batch have the same (.*?)\. A rank", PAGE, re.DOTALL)
    assert re.findall(r"`(\w+)`", listed) == [
        "batch_size", "batch_unit", "micro_batch_size", "sampler", "sampler_config", "where", "order_by", "data_fields",
        "drop_last", "finite", "max_uses", "unmatched", "least_members", "refill", "held",
        "totals",
    ]  # fmt: skip
    assert set(re.findall(r"`(\w+)`", listed)) == {field.name for field in fields(BatchSpec)}


def test_requests_for_ranges_have_the_bytes_of_the_table() -> None:
    ticket, index = bytes(range(16)), 0x01020304
    ours, theirs = socket.socketpair()
    with contextlib.closing(theirs):
        connection = BulkConnection(ours)
        connection.request(ticket, index, lambda size: None)
        connection.close()
        sent = theirs.recv(64)
    rows = rows_of("| offset | bytes | meaning |")
    parts = {meaning: sent[int(offset) :][: int(count)] for offset, count, meaning in rows}
    assert [int(offset) for offset, _, _ in rows] == [0, 4, 20, 24]
    assert sum(int(count) for _, count, _ in rows) == len(sent)
    assert list(parts.values()) == [b"TQB1", ticket, index.to_bytes(4, "little"), bytes(8)]
    assert BULK_BYTES == 2 * 2**20
    assert "From 2 MiB on, bulk connections are faster" in " ".join(section("Bulk connections").split())


def test_connections_are_as_recommended() -> None:
    options = dict(CONNECTION_OPTIONS) | {"grpc.max_receive_message_length": MAX_MESSAGE_BYTES}
    for names, values, reason in rows_of("| option | value | why |"):
        shown = zip(re.findall(r"`(.*?)`", names), values.split(", "), strict=True)
        assert {name: int(value) for name, value in shown}.items() <= options.items()
        assert reason


def test_printable_characters_are_as_said() -> None:
    codes = [*range(0x3000), 0xA0, 0x200B, 0xE000, 0xFFFD, 0x1F600, 0x10FFFF]
    for character in map(chr, codes):
        is_printable = character == " " or unicodedata.category(character)[0] not in "CZ"
        assert character.isprintable() == is_printable, hex(ord(character))


def test_all_names_of_messages_fields_and_values_are_those_of_the_protos() -> None:
    """What looks like a name of the protos, in code marks, is one."""
    files = (commit_pb2, controller_service_pb2, metadata_pb2, storage_service_pb2)
    names: set[str] = set()
    for file in files:
        names |= _names_in(file.DESCRIPTOR)
    written = set(re.findall(r"`([A-Za-z]\w*)(?:\.(\w+))?(?:\{[^`]*\})?`", PAGE))
    messages = {name for name, _ in written if re.fullmatch(r"[A-Z][a-z]\w+", name)}
    constants = {name for name, _ in written if re.fullmatch(r"[A-Z]+_[A-Z_]+", name)}
    fields = {field for name, field in written if field and name in names and name[0].isupper()}
    others = {"BadRequest", "ErrorInfo", "RetryInfo", "Check", "Watch"}
    assert messages - names - others == set()
    assert constants - names == set()
    assert fields
    assert fields - names == set()


def _names_in(file: Any) -> set[str]:
    found = {enum.name for enum in file.enum_types_by_name.values()}
    found |= {value.name for enum in file.enum_types_by_name.values() for value in enum.values}
    for message in file.message_types_by_name.values():
        found |= {message.name, *(field.name for field in message.fields)}
    for service in file.services_by_name.values():
        found |= {service.name, *(method.name for method in service.methods)}
    return found


STANDARD: tuple[type[Message], ...] = (
    health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse, status_pb2.Status, error_details_pb2.ErrorInfo,
    error_details_pb2.BadRequest, error_details_pb2.BadRequest.FieldViolation, error_details_pb2.RetryInfo,
)  # fmt: skip


def test_the_standard_messages_are_as_they_are() -> None:
    (text,) = [block for language, block in FENCES if language == "proto"]
    assert set(re.findall(r"message (\w+)", text)) == {kind.DESCRIPTOR.name for kind in STANDARD}
    assert re.findall(r"package ([\w.]+);", text) == ["grpc.health.v1", "google.rpc"]
    numbers = {(field.name, field.number) for kind in STANDARD for field in kind.DESCRIPTOR.fields}
    numbers |= set(health_pb2.HealthCheckResponse.ServingStatus.items())
    shown = [(name, int(number)) for name, number in re.findall(r"(\w+) = (\d+);", text)]
    assert len(shown) == 16
    assert set(shown) <= numbers


def test_limits_are_the_defaults() -> None:
    rows = rows_of("| what | limit | beyond it | setting |")
    limits = {what: limit for what, limit, _, _ in rows}
    settings = load_settings({}).settings
    for *_, names in rows:
        assert names == "fixed" or set(re.findall(r"`(\w+)`", names)) <= set(type(settings).model_fields)

    def default(name: str) -> int:
        return int(getattr(settings, name))

    def number(text: str) -> int:
        digits, _, unit = text.replace(",", "").partition(" ")
        return int(digits) * {"": 1, "KiB": 2**10, "MiB": 2**20}[unit]

    assert number(limits["one message to the service"]) == default("max_message_bytes")
    assert number(limits["metadata of a call"]) == default("max_metadata_bytes")
    assert number(limits["custom_meta of one sample in one write"]) == default("max_sample_meta_bytes")
    assert number(limits["concurrent calls of one connection"]) == default("max_streams")
    assert number(limits["waiting calls of one connection"]) == default("max_waiting_calls_per_client")
    assert number(limits["watching calls"]) == default("max_watchers")
    assert f"The service remembers the last {MOST_GONE_ROWS:,} cleared samples" in TEXT
    of_partition = limits["fields, tasks, custom_meta columns of a partition"]
    assert [number(each) for each in of_partition.split(", ")] == [
        default(name) for name in ("max_fields", "max_tasks", "max_meta_columns")
    ]
    several = {
        "partitions; samples in all partitions": ("max_partitions", "max_samples"),
        "puts of a storage service: all; uncommitted": ("max_puts", "max_uncommitted_puts"),
    }
    for what, names in several.items():
        assert [number(each) for each in limits[what].split("; ")] == [default(name) for name in names]
    named = limits["names of fields, keys, groups, rollouts, custom_meta columns"]
    assert named == f"{default('max_name_length')} characters"
    assert f"within `stall_seconds` ({default('stall_seconds')})" in TEXT
    assert f"is shortened to {default('max_wait_cap_seconds')} s" in TEXT
    assert f"responses to mutating calls for {default('request_record_seconds') // 60} minutes" in TEXT
    assert f"exceed {default('request_record_bytes') // 2**20} MiB in total" in TEXT
    assert f"not committed within {default('put_ttl_seconds') // 60} minutes" in TEXT
