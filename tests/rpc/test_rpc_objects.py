"""Objects over the network: text, bytes and msgpack, put and read together; rows that are not what they should be."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from live_server import AnyClient, StartServer
from tensordict import NonTensorStack, TensorDict

import tq_service as tq
from tq_service.schema import Encoding
from tq_service.wire import encoding, shared_memory
from tq_service.wire.columns import Column


@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("sharing", ["off", "on"])
def test_text_that_is_none_is_refused_and_leaves_nothing(
    start_server: StartServer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, sharing: str, is_large: bool
) -> None:
    if sharing == "on" and not shared_memory.is_supported():
        pytest.skip("sealed memfds are there on Linux only")
    live = start_server(shared_memory=sharing, shared_memory_dir=str(tmp_path))
    client = live.client()
    rows = ["a text" * (200_000 if is_large else 1)] * 4
    encode_objects = encoding._encode_objects

    def lie(name: str, values: Any, kinds: set[type]) -> Column:
        column = encode_objects(name, values, kinds)
        return dataclasses.replace(column, spec=dataclasses.replace(column.spec, encoding=Encoding.TEXT))

    with monkeypatch.context() as patch:
        patch.setattr(encoding, "_encode_objects", lie)
        bad = [row.encode() for row in rows[:3]] + [rows[3].encode()[:-1] + b"\xff"]
        with pytest.raises(
            tq.errors.InvalidArgumentError, match="row 3 of field 'text' has invalid UTF-8 at byte"
        ) as caught:
            client.put("train", {"text": bad})
    assert (caught.value.metadata["row"], caught.value.metadata["field_name"]) == ("3", "text")
    stat = client.storage_stat()
    assert (stat.used_bytes, stat.put_count, stat.uncommitted_put_count) == (0, 0, 0)
    assert client.list_partitions() == []
    meta = client.put("train", {"text": rows})
    assert list(client.get_data(meta)["text"]) == rows


def test_msgpack_that_is_none_is_an_error_of_its_row_when_it_is_read(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start_server().client()
    encode_objects = encoding.encode_objects
    with monkeypatch.context() as patch:
        patch.setattr(
            encoding, "encode_objects", lambda values, name, first: [*encode_objects(values[:2], name), b"\xc1"]
        )
        meta = client.put("train", {"x": [None, 1, 2]})
    with pytest.raises(tq.errors.InvalidArgumentError, match="could not decode row 2 of field 'x'") as caught:
        client.get_data(meta)
    assert (caught.value.metadata["row"], caught.value.metadata["field_name"]) == ("2", "x")
    assert list(client.get_data(meta.select_samples([0, 1]))["x"]) == [None, 1]


def test_objects_of_all_encodings_are_one_field(start_server: StartServer) -> None:
    client = start_server().client()
    rows: list[Any] = ["text", "", b"\xff\x00", b"", None, {"a": (1, 2)}]
    for start in range(0, 6, 2):
        keys = [str(start), str(start + 1)]
        client.put("train", {"x": rows[start : start + 2], "n": [start, start + 1]}, keys=keys)
    order = [5, 0, 3, 2, 1, 4]
    got = client.get_data("train", keys=[str(each) for each in order], data_fields=["x", "n"])
    assert list(got["x"]) == [rows[each] for each in order]
    assert got["n"].tolist() == order
    for each, row in enumerate(rows):
        assert list(client.get_data("train", keys=[str(each)], data_fields=["x"])["x"]) == [row]
    client.put("train", {"x": [b"now bytes"]}, keys=["0"])
    assert list(client.get_data("train", keys=["0", "1"], data_fields=["x"])["x"]) == [b"now bytes", ""]


def test_a_field_declared_as_text_takes_nothing_else(start_server: StartServer) -> None:
    client = start_server().client()
    client.create_partition(
        "train",
        fields=[
            tq.FieldSpec("text", layout="object", encoding="text"),  # type: ignore[arg-type]
            tq.FieldSpec("any", layout="object", encoding="msgpack"),  # type: ignore[arg-type]
        ],
    )
    client.put("train", {"text": ["a"], "any": ["a"]}, keys=["a"])
    for wrong in ([None], [b"b"], [{"b": 1}]):
        with pytest.raises(tq.errors.FieldMismatchError, match=r"'text' is object \(text\), got object \((m|b)"):
            client.put("train", {"text": wrong, "any": wrong})
    client.put("train", {"any": [b"b"]}, keys=["a"])
    assert list(client.get_data("train", keys=["a"], data_fields=["any"])["any"]) == [b"b"]
    specs = [field.spec for field in client.describe_partition("train").fields]
    assert [(spec.name, spec.encoding) for spec in specs] == [("any", "msgpack"), ("text", "text")]


def test_an_encoding_is_of_objects() -> None:
    with pytest.raises(
        tq.errors.InvalidArgumentError, match="encoding 'text' applies only to objects, but the layout is dense"
    ):
        tq.FieldSpec("x", dtype="int64", layout="dense", encoding="text")  # type: ignore[arg-type]
    with pytest.raises(
        tq.errors.InvalidArgumentError, match="encoding 'json' is unknown; use one of text, msgpack, bytes"
    ):
        tq.FieldSpec("x", layout="object", encoding="json")  # type: ignore[arg-type]


@pytest.mark.parametrize("hold", ["stack", "array"])
def test_objects_take_rows_of_any_kind_in_each_put(client: AnyClient, hold: str) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (5, 3), (1, 2, 3))
    puts: list[list[Any]] = [[1, 0], [0.5, 1], [2, None], [torch.ones(2), np.float32(0.5)], ["a", OrderedDict(b=image)]]
    for number, rows in enumerate(puts):
        held: Any = NonTensorStack(*rows)
        if hold == "array":
            held = np.empty(2, object)
            held[:] = rows
        data = TensorDict({"x": held}, batch_size=[2])
        client.put("train", data, keys=[f"{number}a", f"{number}b"])
    keys = [f"{number}{row}" for number in reversed(range(len(puts))) for row in "ba"]
    got = list(client.get_data("train", keys=keys)["x"])
    assert repr(got[2:]) == repr([row for rows in reversed(puts[:-1]) for row in reversed(rows)])
    assert got[:2] == [{"b": image}, "a"]
    again = client.put("again", client.get_data("train", keys=keys))
    assert repr(list(client.get_data(again)["x"])[2:]) == repr(got[2:])
