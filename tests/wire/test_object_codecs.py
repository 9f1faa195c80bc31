"""Objects of types that have a codec: registered ones, and images of PIL."""

from __future__ import annotations

import dataclasses
import io
import sys
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from one_object import encode_object

import tq_service as tq
from tq_service.wire import objects
from tq_service.wire.objects import decode_object


@dataclasses.dataclass
class Trajectory:
    """What a user may want to put as it is."""

    prompt: str
    tokens: torch.Tensor
    parts: list[Any] = dataclasses.field(default_factory=list)


class Marked(Trajectory):
    """A trajectory too."""


def fields_of(trajectory: Trajectory) -> dict[str, Any]:
    return dict(vars(trajectory))


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a test stays registered."""
    monkeypatch.setattr(objects, "_by_name", {})
    monkeypatch.setattr(objects, "_by_kind", {})


def register(name: str = "test.Trajectory", kind: type = Trajectory, **others: Any) -> None:
    codec = {"encode": fields_of, "decode": lambda parts: kind(**parts)} | others
    tq.register_object_codec(name, kind, **codec)


def test_objects_with_a_codec_come_back_wherever_they_are() -> None:
    register()
    inner = Trajectory("b", torch.tensor([1]))
    outer = Trajectory("a", torch.arange(3), [inner, (inner,), {"k": {2**70}}])
    back = decode_object(encode_object([outer, {"x": (outer,)}]))
    for got in (back[0], back[1]["x"][0]):
        assert (type(got), got.prompt, got.tokens.tolist()) == (Trajectory, "a", [0, 1, 2])
        assert got.parts[0].tokens.tolist() == got.parts[1][0].tokens.tolist() == [1]
        assert got.parts[2] == {"k": {2**70}}


def test_a_subclass_is_put_as_the_type_that_has_a_codec_and_its_own_comes_first() -> None:
    register()
    assert type(decode_object(encode_object(Marked("a", torch.zeros(1))))) is Trajectory
    register("test.Marked", Marked)
    assert type(decode_object(encode_object(Marked("a", torch.zeros(1))))) is Marked


def test_a_codec_comes_before_what_would_be_made_of_a_derived_type() -> None:
    class Messages(list[str]):
        pass

    tq.register_object_codec("test.Messages", Messages, encode=list, decode=Messages)
    assert type(decode_object(encode_object({"m": Messages(["a"])}))["m"]) is Messages


def test_the_last_registration_counts() -> None:
    register()
    written = encode_object(Trajectory("a", torch.zeros(1)))
    register(encode=lambda one: one.prompt, decode=lambda prompt: ("decoded again", prompt))
    assert decode_object(encode_object(Trajectory("a", torch.zeros(1)))) == ("decoded again", "a")
    register(kind=Marked)  # the name has another type now, and Trajectory no codec
    assert type(decode_object(written)) is Marked
    with pytest.raises(tq.errors.UnsupportedObjectError, match="Trajectory, which only pickle"):
        encode_object(Trajectory("a", torch.zeros(1)))


def test_an_unknown_codec_is_named_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    register("acme.Trajectory")
    written = encode_object({"x": Trajectory("a", torch.zeros(1))})
    monkeypatch.setattr(objects, "_by_name", {})
    with pytest.raises(
        tq.errors.InvalidArgumentError, match=r"codec 'acme.Trajectory', which is not registered in this process; call"
    ):
        decode_object(written)


def test_what_a_codec_raises_is_told_with_its_name_and_the_place() -> None:
    def fail(_: Any) -> Any:
        raise KeyError("no such part")

    register(encode=fail)
    with pytest.raises(tq.errors.UnsupportedObjectError, match=r"x\[0\]\['a'\] was rejected by codec.*no such part"):
        encode_object({"a": Trajectory("a", torch.zeros(1))}, "x")
    register(decode=fail)
    with pytest.raises(
        tq.errors.InvalidArgumentError, match=r"codec 'test.Trajectory' could not decode an object: KeyError"
    ):
        decode_object(encode_object(Trajectory("a", torch.zeros(1))))


def test_a_codec_that_makes_what_cannot_be_carried_is_refused() -> None:
    register(encode=lambda one: object())
    with pytest.raises(tq.errors.UnsupportedObjectError, match=r"x\[0\]\[0\] has type .*Trajectory"):
        encode_object([Trajectory("a", torch.zeros(1))], "x")
    register(encode=lambda one: one)  # never ends
    with pytest.raises(tq.errors.UnsupportedObjectError, match="nested more than 32 levels deep"):
        encode_object([Trajectory("a", torch.zeros(1))], "x")


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 513])
def test_a_name_is_refused_that_cannot_be_typed(name: str) -> None:
    with pytest.raises(tq.errors.InvalidArgumentError, match="name is"):
        register(name)


@pytest.mark.parametrize("kind", [dict, str, list, type(None), "Trajectory"])
def test_types_that_are_carried_anyhow_take_no_codec(kind: Any) -> None:
    with pytest.raises(tq.errors.InvalidArgumentError, match="kind is"):
        register(kind=kind)


# Images of PIL


MODES = ["1", "L", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "LA"]
NAMES = [*MODES, "I;16", "P", "P with alpha", "empty"]


def images() -> dict[str, Any]:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    coloured = image.fromarray(pixels)
    found = {mode: coloured.convert(mode) for mode in MODES}
    found["I;16"] = image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    found["P"] = coloured.quantize(9)
    transparent = coloured.quantize(9)
    transparent.putpalette(bytes(range(36)), "RGBA")
    return found | {"P with alpha": transparent, "empty": image.new("RGB", (0, 3))}


@pytest.mark.parametrize("name", NAMES)
def test_images_come_back_with_the_same_pixels(name: str) -> None:
    image = images()[name]
    back = decode_object(encode_object({"prompt": [image]}))["prompt"][0]
    assert back == image
    assert (back.mode, back.size, back.info) == (image.mode, image.size, image.info)
    if image.size[0]:
        assert back.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()
    back.putdata([back.getpixel((0, 0))] if image.size[0] else [])  # writable


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
def test_images_of_files_come_back_with_their_pixels_and_plain_facts(kind: str) -> None:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    images()["P"].convert("RGB" if kind == "JPEG" else "P").save(file, kind, dpi=(72, 72), transparency=3)
    opened = image.open(io.BytesIO(file.getvalue()))
    opened.info["of PIL"] = object()
    back = decode_object(encode_object(opened))
    assert type(back) is image.Image
    assert back.tobytes() == opened.tobytes()
    assert back.convert("RGBA").tobytes() == opened.convert("RGBA").tobytes()
    del opened.info["of PIL"]
    assert back.info == opened.info


def test_an_image_that_lies_about_its_size_takes_no_memory() -> None:
    pytest.importorskip("PIL.Image")
    lie = {"mode": "RGB", "size": (1 << 30, 1 << 30), "pixels": b"123", "palette": None, "info": {}}
    payload = msgpack.packb(["PIL.Image", {**lie, "size": list(lie["size"])}])  # type: ignore[call-overload]
    with pytest.raises(tq.errors.InvalidArgumentError, match="got only 3 bytes for an image of size"):
        decode_object(msgpack.packb(msgpack.ExtType(10, payload)))


def test_an_image_without_pil_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    written = encode_object(images()["RGB"])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(tq.errors.InvalidArgumentError, match="install pillow"):
        decode_object(written)


def test_images_may_be_given_a_codec_of_ones_own() -> None:
    image = pytest.importorskip("PIL.Image")

    def to_png(one: Any) -> bytes:
        file = io.BytesIO()
        one.save(file, "PNG")
        return file.getvalue()

    tq.register_object_codec("test.png", image.Image, encode=to_png, decode=lambda data: image.open(io.BytesIO(data)))
    written = encode_object(images()["RGB"])
    assert b"test.png" in written
    assert decode_object(written).tobytes() == images()["RGB"].tobytes()
