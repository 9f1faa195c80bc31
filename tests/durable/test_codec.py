"""A dataclass comes back from its bytes as it was, by its declaration alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from property_settings import examples

from tq_service.errors import NewerVersionError
from tq_service.journal import codec


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Place(NamedTuple):
    name: str
    life: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    number: int = 0
    texts: tuple[str, ...] = ()
    color: Color | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    rows: NDArray[np.int64] | None = None
    values: NDArray[Any] | None = None
    inner: Inner = field(default_factory=Inner)
    several: Sequence[Inner] = ()
    nested: tuple[tuple[Inner, ...], ...] = ()
    place: Place | None = None
    mode: Literal["new", "old"] = "new"
    ratio: float | None = None
    plain: Mapping[str, Inner] = field(default_factory=dict)
    either: tuple[int | float | str | bool, ...] = ()
    pair: tuple[int, Place] | None = None
    hint: object = field(default=None, metadata={"is_encoded": False}, compare=False)


def again(value: Any) -> Any:
    return codec.decoder(type(value))(codec.unpack(codec.encode(value)))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, each.name), getattr(other, each.name)) for each in dataclasses.fields(one)
        )
    return type(one) is type(other) and bool(one == other)


INTEGERS = st.integers(-(2**63), 2**63 - 1)
INNERS = st.builds(
    Inner, number=INTEGERS, texts=st.lists(st.text()).map(tuple), color=st.none() | st.sampled_from(Color)
)
ROWS = st.lists(INTEGERS, max_size=40).map(lambda values: np.array(values, np.int64)) | st.builds(
    lambda first, count: np.arange(first, first + count), st.integers(-100, 2**60), st.integers(0, 100)
)
VALUES = st.one_of(
    st.lists(st.booleans()).map(lambda values: np.array(values, np.bool_)),
    st.lists(st.floats(allow_nan=False)).map(lambda values: np.array(values, np.float64)),
    st.lists(st.integers(-(2**31), 2**31 - 1)).map(lambda values: np.array(values, np.int32)),
    st.lists(st.none() | st.text()).map(lambda values: np.array([*values, None], np.object_)[:-1]),
    st.integers(0, 5).map(lambda rows: np.arange(rows * 3).reshape(rows, 3)),
)
OUTERS = st.builds(
    Outer,
    name=st.text(),
    rows=st.none() | ROWS,
    values=st.none() | VALUES,
    inner=INNERS,
    several=st.lists(INNERS),
    nested=st.lists(st.lists(INNERS).map(tuple)).map(tuple),
    place=st.none() | st.builds(Place, st.text(), st.binary()),
    mode=st.sampled_from(["new", "old"]),
    ratio=st.none() | st.floats(allow_nan=False),
    plain=st.dictionaries(st.text(), INNERS),
    either=st.lists(INTEGERS | st.floats(allow_nan=False) | st.text() | st.booleans()).map(tuple),
    pair=st.none() | st.tuples(INTEGERS, st.builds(Place, st.text(), st.binary())),
)


@examples(100)
@given(OUTERS)
def test_a_dataclass_comes_back_as_it_was(value: Outer) -> None:
    back = again(value)
    assert same(
        dataclasses.replace(back, several=list(back.several)), dataclasses.replace(value, several=list(value.several))
    )


def test_fields_with_their_default_take_no_bytes() -> None:
    assert codec.unpack(codec.encode(Inner())) == {}
    assert codec.unpack(codec.encode(Inner(number=3))) == {"number": 3}


def test_a_hint_is_not_encoded() -> None:
    assert again(Outer(name="x", hint=object())).hint is None


def test_rows_that_follow_each_other_take_two_numbers() -> None:
    assert len(codec.encode(np.arange(5, 5 + (1 << 20)))) < 32
    assert np.array_equal(codec.unpack(codec.encode(np.arange(5, 5000))), np.arange(5, 5000))


@pytest.mark.parametrize("rows", [[5, 7, 6, 8] * 5, [*range(18), 18, 18], [*range(10), 30, *range(11, 31)]])
def test_rows_that_do_not_are_kept_one_by_one(rows: list[int]) -> None:
    assert codec.unpack(codec.encode(np.array(rows))).tolist() == rows


def test_arrays_cannot_be_written_to() -> None:
    for values in (np.arange(100), np.array([3, 1]), np.array([True]), np.array(["x", None], np.object_)):
        with pytest.raises(ValueError, match="read-only"):
            codec.unpack(codec.encode(values))[0] = 1


def test_what_was_written_before_a_field_was_added_takes_its_default() -> None:
    before = dataclasses.make_dataclass("Grown", [("a", int)], kw_only=True)
    after = dataclasses.make_dataclass("Grown", [("a", int), ("b", int, field(default=7))], kw_only=True)
    assert codec.decoder(after)(codec.unpack(codec.encode(before(a=1)))) == after(a=1, b=7)


def test_a_field_that_is_not_known_was_written_by_a_newer_version() -> None:
    before = dataclasses.make_dataclass("Grown", [("a", int)], kw_only=True)
    after = dataclasses.make_dataclass("Grown", [("a", int), ("b", int, field(default=7))], kw_only=True)
    with pytest.raises(NewerVersionError, match=r"Grown has the unknown field 'b'.*newer version"):
        codec.decoder(before)(codec.unpack(codec.encode(after(a=1, b=8))))
    with pytest.raises(NewerVersionError, match="unknown kind 99"):
        codec.unpack(msgpack.packb(msgpack.ExtType(99, b"")))


def test_a_field_without_default_must_be_there() -> None:
    with pytest.raises(TypeError, match="name"):
        codec.decoder(Outer)({})


@pytest.mark.parametrize("value", [object(), np.array([{}], np.object_).reshape(1, 1), 2**64, {1, 2}])
def test_what_has_no_bytes_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, OverflowError)):
        codec.encode(value)
