"""Texts of samples are the same as bytes, in a message and as strings of Python."""

from __future__ import annotations

import pickle
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq_service.errors import InvalidArgumentError
from tq_service.journal.codec import decode, encode
from tq_service.texts import Texts, hash_of
from tq_service.v1 import metadata_pb2 as pb
from tq_service.wire.texts import decode_texts, fill_packed, fill_texts

TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.text("ab\0", max_size=20),
    st.sampled_from(["", "a", "ü" * 9, "x" * 300]),
)
# Up to some hundred texts, neighbours often alike.
TEXTS = st.lists(st.tuples(TEXT, st.integers(1, 40)), max_size=12).map(
    lambda runs: [text for text, count in runs for _ in range(count)]
)


def forms(texts: list[str]) -> list[Texts]:
    packed = [Texts.of(texts), Texts.of_shared(texts)]
    if not any(text.endswith("\0") for text in texts):  # which an array of numpy cannot have
        array = np.array(texts, np.str_)
        packed += [Texts.of_array(array), Texts.of_array(array, are_shared=True)]
        packed.append(Texts.of_array(np.repeat(array, 2)[::2], are_shared=True))
        packed.append(Texts.of_array(array.astype(array.dtype.newbyteorder(">"))))
    return packed


@given(TEXTS)
def test_texts_are_a_sequence_of_strings(texts: list[str]) -> None:
    for packed in forms(texts):
        assert len(packed) == len(texts)
        assert packed.tolist() == list(packed) == packed[:] == texts
        assert [packed[place] for place in range(len(texts))] == texts
        assert packed[3:9:2] == texts[3:9:2]
        some = np.arange(len(texts))[::-3]
        assert packed.at(some) == [texts[place] for place in some]
        assert packed.longest == max(map(len, texts), default=0)
        distinct = packed.distinct()
        assert [distinct[code] for code in packed.codes] == texts
        assert list(pickle.loads(pickle.dumps(packed))) == texts


@given(TEXTS)
def test_those_that_neighbours_share_are_there_once(texts: list[str]) -> None:
    assert Texts.of_shared(texts).distinct() == [text for text, _ in groupby(texts)]


@given(TEXTS, TEXTS)
def test_equal_texts_have_one_hash_and_others_another(one: list[str], other: list[str]) -> None:
    known: dict[str, int] = {}
    for texts in (one, other):
        packed = Texts.of(texts)
        hashes = np.concatenate([packed.hashes(0, 7), packed.hashes(7)])
        for text, value in zip(texts, hashes.tolist(), strict=True):
            assert known.setdefault(text, value) == value == hash_of(text)
    assert len(set(known.values())) == len(known)


def test_texts_that_differ_in_one_place_have_hashes_that_fill_the_bits_evenly() -> None:
    hashes = Texts.of([f"prompt-{number:06d}/r{number % 8}" for number in range(1 << 16)]).hashes()
    assert np.unique(hashes).size == 1 << 16
    for shift in (0, 24, 48):
        counts = np.bincount(((hashes >> np.uint64(shift)) & np.uint64(0xFF)).astype(np.int64), minlength=256)
        assert counts.min() > 128
        assert counts.max() < 512


def test_there_is_no_text_beyond_the_end() -> None:
    for place in (-3, 2):
        with pytest.raises(IndexError, match=f"there are 2 texts, and none at {place}"):
            Texts.of(["a", "b"])[place]


@given(TEXTS)
def test_texts_come_back_from_a_message(texts: list[str]) -> None:
    for given_texts in (texts, *forms(texts)):
        for are_shared in (False, True):
            message = pb.Texts()
            fill_texts(message, given_texts, "keys", are_shared=are_shared)
            back = decode_texts(pb.Texts.FromString(message.SerializeToString()), len(texts), "keys")
            assert list(back) == texts


@given(TEXTS)
def test_texts_come_back_from_the_log(texts: list[str]) -> None:
    for packed in forms(texts):
        back: Texts = decode(object, encode(packed))
        assert (back.tolist(), back.distinct()) == (texts, packed.distinct())


@pytest.mark.parametrize("count", [3, 1000])
@pytest.mark.parametrize("wrong", [7, None, b"k", "\ud800"])
def test_what_is_no_text_is_named(count: int, wrong: object) -> None:
    texts: list[object] = ["k"] * count
    texts[2] = wrong
    for are_shared in (False, True):
        with pytest.raises(
            InvalidArgumentError, match=r"keys\[2\] is .*, expected a string, in valid Unicode"
        ) as caught:
            fill_texts(pb.Texts(), texts, "keys", are_shared=are_shared)  # type: ignore[arg-type]  # what callers may do
        assert caught.value.field == "keys"


MANY = "ü".encode() * 100


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (pb.Texts(utf8=b"ab", sizes=[1]), "sizes of 1 bytes together, but utf8 of 2"),
        (pb.Texts(utf8=b"a", sizes=[2**32 - 1] * 4), "sizes of 17179869180 bytes together, but utf8 of 1"),
        (pb.Texts(utf8=b"a"), "sizes of 0 bytes together, but utf8 of 1"),
        (pb.Texts(utf8=b"ab", sizes=[1, 1], counts=[1]), "1 counts, 0 of them 0, for 2 sizes"),
        (pb.Texts(utf8=b"ab", sizes=[1, 1], counts=[1, 0]), "2 counts, 1 of them 0, for 2 sizes"),
        (pb.Texts(counts=[2]), "1 counts, 0 of them 0, for 0 sizes"),
        (pb.Texts(utf8=b"a", sizes=[1], counts=[2**32 - 1]), "got 4294967295 groups for 200 samples"),
        (pb.Texts(utf8=b"a" * 201, sizes=[1] * 201), "got 201 groups for 200 samples"),
        (pb.Texts(utf8=b"\xff", sizes=[1]), "not the UTF-8 of texts"),
        (pb.Texts(utf8=MANY, sizes=[1] * 200), "a text begins within a character"),
        (pb.Texts(utf8=MANY + b"\xff", sizes=[*[2] * 100, 1]), "not the UTF-8 of texts"),
        (pb.Texts(utf8="ü".encode(), sizes=[1, 0, 1]), "a text begins within a character"),
    ],
)
def test_a_message_that_does_not_add_up_is_refused(message: pb.Texts, what: str) -> None:
    with pytest.raises(InvalidArgumentError, match=what) as caught:
        decode_texts(message, 200, "groups")
    assert caught.value.field == "groups"


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=70), st.integers(0, 3000))
def test_numbers_are_filled_in_as_one_by_one(values: list[int], more: int) -> None:
    values = [*values, *range(more)]
    filled, plain = pb.Int64Values(), pb.Int64Values(values=values)
    fill_packed(filled, "values", np.array(values, np.int64))
    assert filled == plain
    assert filled.SerializeToString() == plain.SerializeToString()


@pytest.mark.parametrize("width", [1, 2, 3, 8, 31, 32, 33])
@pytest.mark.parametrize("order", ["=", ">"])
def test_only_neighbours_that_are_the_same_text_are_shared(width, order):
    rng = np.random.default_rng(width)
    drawn = ["".join(rng.choice(list("aé"), rng.integers(0, width + 1))) for _ in range(200)]
    array = np.array([*drawn, "x" * width, "x" * width], f"{order}U{width}")
    for each in (array, array[::2], array[:1], array[:0]):
        shared = Texts.of_array(each, are_shared=True)
        texts = each.tolist()
        assert shared.tolist() == texts
        assert shared.distinct() == [text for text, _ in groupby(texts)]
