"""What errors say of names that are not known."""

from __future__ import annotations

import difflib

import pytest

from tq_service.errors import nearest


def test_what_is_close_is_named_and_the_rest_counted() -> None:
    assert nearest("tarin", ["train", "eval", "test"]).startswith("known: 'train'")
    assert nearest("zzz", ["a", "b"]) == "known: 'a', 'b'"
    assert nearest("zzz", list("abcdefg")) == "known: 'a', 'b', 'c', 'd', 'e', 'f', 'g'"
    assert nearest("cc", list("abcdefghijkl")) == "known: 'c', 'a', 'b', 'd', 'e', 'f', 'g', 'h', 'i', 'j' and 2 more"
    assert nearest("x", []) == "none is known yet"


def test_a_typo_is_found_among_many_names() -> None:
    known = dict.fromkeys(f"train@step_{number:05}" for number in range(9_000))
    clause = nearest("train@stap_04321", known)
    assert "'train@step_" in clause
    assert clause.endswith("and 8990 more")
    assert clause.count("'train@step_") == 10
    assert "'train@step_04321'" in nearest("train@step_04321x", known)


def test_long_names_are_shown_whole() -> None:
    known = "k" * 200 + "end"
    assert nearest("k" * 300, [known, "a"]) == f"known: {known!r}, 'a'"


def test_long_names_leave_space_for_the_rest_of_the_message() -> None:
    known = [f"{'k' * 300}{number}" for number in range(10)]
    clause = nearest("k" * 300, known)
    assert any(clause == f"known: {name!r} and 9 more" for name in known)
    assert nearest("x" * 300, ["y" * 1000, "z"]) == f"known: {'y' * 1000!r} and 1 more"


def test_all_names_are_shown_where_they_are_few() -> None:
    known = [f"sampler_{letter}" for letter in "abcdefghijklmnop"]
    clause = nearest("samplerq", known, all_known=True)
    assert all(repr(name) in clause for name in known)
    assert "more" not in clause


@pytest.mark.parametrize("name", ["x y" * 1_000_000, "train@1"])
def test_clients_cannot_make_it_compare_much(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int, int]] = []
    compare = difflib.get_close_matches

    def counted(word: str, possibilities: dict[str, str], **options: float) -> list[str]:
        sizes.append((len(word), len(possibilities), max(map(len, possibilities))))
        return compare(word, possibilities, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    nearest(name, dict.fromkeys(f"train@{number}" + "abcdefgh" * 60 for number in range(20_000)))
    ((word, count, longest),) = sizes
    assert word <= 64
    assert count <= 128
    assert longest <= 64
