"""Codecs for objects of types that have none of their own: registered by name, and one for images of PIL.

The name travels with each object, so that its reader looks up what makes the object again; a type's module or its
class never do. PIL is not imported before an image is put or read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tq_service.errors import InvalidArgumentError
from tq_service.schema import check_name

_CARRIED: Final = frozenset({
    type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, list, tuple, set, frozenset, dict,
})  # fmt: skip
_IMAGE: Final = "PIL.Image"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectCodec:
    """How objects of one type are carried; see `register_object_codec`."""

    name: str
    kind: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_name: Final[dict[str, ObjectCodec]] = {}
_by_kind: Final[dict[type, ObjectCodec]] = {}


def register_object_codec(name: str, kind: type, *, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
    """Have objects of a type put and read as what a codec makes of them, for this process.

    A process that puts such objects and one that reads them register the same name, before they do: a process of a
    loader's workers too, so best where the type is defined. The last registration of a name or a type counts.

    Args:
        name: goes with each object, 1 to 512 printable characters; best with a prefix of one's own, such as
            "acme.Trajectory".
        kind: the type; instances of its subclasses are put as it too, unless they have a codec of their own.
        encode: makes of an object what can be put without it: plain values, tensors, arrays, containers of them.
        decode: makes the object of that again. It runs in every reader, on what any producer may have put: it should
            take nothing for granted, and unpickle nothing.

    Raises:
        InvalidArgumentError: the name; or objects of the type are carried as they are, so that no codec is asked.
    """
    check_name("name", name)
    if not isinstance(kind, type) or kind in _CARRIED:
        raise InvalidArgumentError(
            f"kind is {kind!r}, expected a type that objects are not carried as anyhow; register a class of your own",
            field="kind",
        )
    before = _by_name.get(name)
    if before is not None and _by_kind.get(before.kind) is before:
        del _by_kind[before.kind]
    _by_name[name] = _by_kind[kind] = ObjectCodec(name=name, kind=kind, encode=encode, decode=decode)


def codec_of(kind: type) -> ObjectCodec | None:
    """Return the codec for instances of a type, None where there is none."""
    for base in kind.__mro__:
        if base in _by_kind:
            return _by_kind[base]
    return _image_codec(kind) if is_image_type(kind) else None


def codec_named(name: str) -> ObjectCodec:
    """Return a codec by its name.

    Raises:
        InvalidArgumentError: nothing has registered it here, or PIL is not installed.
    """
    if name in _by_name:
        return _by_name[name]
    if name != _IMAGE:
        raise InvalidArgumentError(
            f"an object has the codec {name!r:.200}, which is not registered here; call "
            "tq_service.register_object_codec with this name first"
        )
    try:
        from PIL import Image  # noqa: PLC0415  (optional)
    except ImportError:
        raise InvalidArgumentError("an object is an image of PIL, which is not installed; install pillow") from None
    return _image_codec(Image.Image)


# Images of PIL: their pixels as they lie in memory. PNG is half as large, and takes a hundred times as long.


def is_image_type(kind: type) -> bool:
    """Whether values of this type are images of PIL."""
    image = getattr(sys.modules.get(_IMAGE), "Image", None)  # none while another thread still imports it
    return isinstance(image, type) and issubclass(kind, image)


def _image_codec(kind: type) -> ObjectCodec:
    return ObjectCodec(name=_IMAGE, kind=kind, encode=_encode_image, decode=_decode_image)


def _encode_image(image: Any) -> dict[str, Any]:
    pixels = image.tobytes()  # reads a file that was opened only; what follows is known then
    palette = image.getpalette(None) if image.mode in {"P", "PA"} else None
    return {
        "mode": image.mode,
        "size": image.size,
        "pixels": pixels,
        "palette": None if palette is None else (image.palette.mode, bytes(palette)),
        "info": {name: value for name, value in image.info.items() if isinstance(name, str) and _is_plain(value)},
    }


def _is_plain(value: Any) -> bool:
    """Whether a fact about an image can be carried; some formats have objects of PIL there."""
    return type(value) in {bool, int, float, str, bytes} or (type(value) is tuple and all(map(_is_plain, value)))


def _decode_image(parts: Mapping[str, Any]) -> Any:
    from PIL import Image  # noqa: PLC0415  (optional; `codec_named` has imported it)

    size, pixels = parts["size"], parts["pixels"]
    if math.prod(size) > 8 * len(pixels):  # at a bit each; before memory is reserved for them
        raise ValueError(f"got {len(pixels)} bytes for an image of size {size}")
    image = Image.frombytes(parts["mode"], size, pixels)
    if parts["palette"] is not None:
        rawmode, palette = parts["palette"]
        image.putpalette(palette, rawmode)
    image.info.update(parts["info"])
    return image
