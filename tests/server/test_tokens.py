"""The tokens file: what it says, what is refused, and how it is followed."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from certificates import add_token
from hypothesis import given
from hypothesis import strategies as st

from tq_service.errors import InvalidArgumentError
from tq_service.server.credential_files import (
    Token,
    TokenFile,
    append_token,
    digest_of,
    format_entry,
    make_token,
    new_secret,
    parse_tokens,
    read_tokens,
)
from tq_service.wire.connection import ROLES

GOOD = '[[token]]\nname = "a"\nsha256 = "' + "0" * 64 + '"\nroles = ["read"]\nprefixes = [""]\n'


def token(name: str = "a", **more: object) -> Token:
    return make_token(**{"name": name, "sha256": digest_of(name), "roles": ["read"], "prefixes": [""], **more})


@given(
    prefixes=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1),
    roles=st.sets(st.sampled_from(ROLES), min_size=1),
    expires=st.none() | st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC)),
)
def test_entries_are_read_as_they_were_written(prefixes: list[str], roles: set[str], expires: datetime | None) -> None:
    end = None if expires is None else expires.replace(microsecond=0)
    written = token(prefixes=prefixes, roles=roles, expires=end)
    assert parse_tokens(format_entry(written)) == {written.sha256: written}


def test_a_secret_is_random_and_only_its_digest_is_kept() -> None:
    first, second = new_secret(), new_secret()
    assert first != second
    assert len(first) == 46
    assert first.startswith("tq_")
    assert digest_of(first) == hashlib.sha256(first.encode()).hexdigest()
    assert first not in format_entry(token(sha256=digest_of(first)))
    assert first not in repr(token(sha256=digest_of(first)))


def test_prefixes() -> None:
    assert token(prefixes=("",)).covers("anything")
    limited = token(prefixes=("train@", "eval/"))
    assert limited.covers("train@3")
    assert not limited.covers("train")
    assert not limited.covers("")
    assert not limited.covers("Train@3")


def test_the_end_of_a_token() -> None:
    now = datetime.now(UTC)
    assert not token().is_expired()
    assert token(expires=now).is_expired()
    assert not token(expires=now + timedelta(hours=1)).is_expired()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[[token", "not valid TOML"),
        ("a = 1", r"\[\[token\]\] entries"),
        ("token = 3", r"\[\[token\]\] entries"),
        ("token = [3]", r"\[\[token\]\] entries"),
        (GOOD.replace("name", "nam"), "unknown key 'nam'"),
        (GOOD.replace('"a"', "3"), "name: got 3; expected 1 to 64 letters"),
        (GOOD.replace('"a"', '"a b"'), "name: got 'a b'"),
        (GOOD.replace('"a"', '""'), "name: got ''"),
        (GOOD.replace("0" * 64, "0" * 63), "sha256: expected 64"),
        (GOOD.replace("0" * 64, "tq_secret"), "^((?!tq_secret).)*$"),
        (GOOD.replace("sha256", "sha"), "unknown key 'sha'; expected one of name, sha256"),
        (GOOD.replace("prefixes", "#"), "prefixes: got None; expected a list"),
        (
            GOOD.replace('["read"]', '["boss"]'),
            r"roles: got \['boss'\]; expected a list of one or more of read",
        ),
        (GOOD.replace('["read"]', "[]"), r"roles: got \[\]; expected a list of one or more"),
        (GOOD.replace('["read"]', '"read"'), "roles: got 'read'; expected a list"),
        (GOOD.replace('[""]', "[]"), r"prefixes: got \[\]; expected a list of one or more strings"),
        (GOOD.replace('[""]', "[1]"), "prefixes: got"),
        (GOOD + 'expires = "2027-01-01"', "expires: got"),
        (GOOD + "expires = 2027-01-01T00:00:00", "a time with its time zone"),
        (GOOD + GOOD, "of an earlier entry"),
        (GOOD + GOOD.replace('"a"', '"b"'), "of an earlier entry"),
        (GOOD + GOOD.replace("000", "111"), "of an earlier entry"),
    ],
)
def test_wrong_files_say_what_is_wrong(text: str, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        parse_tokens(text)


@pytest.mark.parametrize(("mode", "is_good"), [(0o600, True), (0o640, True), (0o644, False), (0o660, False)])
def test_a_file_that_others_read_or_change_is_refused(tmp_path: Path, mode: int, is_good: bool) -> None:
    path = tmp_path / "tokens.toml"
    add_token(path, "a", ["read"])
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(mode)
    if is_good:
        assert len(read_tokens(path)) == 1
    else:
        with pytest.raises(InvalidArgumentError, match=f"has mode {mode:04o}, .*chmod 0600 or 0640"):
            read_tokens(path)


def test_appending_keeps_what_is_there_and_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text("# ours\n" + format_entry(token("a")))
    path.chmod(0o640)
    append_token(path, token("b"))
    assert path.read_text().startswith("# ours\n")
    assert {each.name for each in read_tokens(path).values()} == {"a", "b"}
    assert path.stat().st_mode & 0o777 == 0o640
    before = path.read_text()
    with pytest.raises(InvalidArgumentError, match="of an earlier entry"):
        append_token(path, token("b", sha256=digest_of("other")))
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["tokens.toml"]


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    with pytest.raises(InvalidArgumentError, match=r"could not read the tokens file .*: No such file"):
        read_tokens(path)
    path.write_bytes(b"\xff\xfe")
    path.chmod(0o600)
    with pytest.raises(InvalidArgumentError, match=r"tokens\.toml"):
        read_tokens(path)


def look_twice(file: TokenFile) -> None:
    file.reload()
    file.reload()


def test_a_changed_file_is_followed_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens.toml"
    first = add_token(path, "a", ["read"])
    file = TokenFile(path)
    known = file.tokens
    look_twice(file)
    assert file.tokens is known
    second = add_token(path, "b", ["produce"])
    look_twice(file)
    assert set(file.tokens) == {digest_of(first), digest_of(second)}
    known = file.tokens
    for break_it in (
        lambda: path.write_text("[[token"),
        lambda: path.chmod(0o644),
        path.unlink,
    ):
        caplog.clear()
        break_it()
        os.utime(tmp_path)
        look_twice(file)
        assert file.tokens is known
    assert "stay valid" in caplog.text
    third = add_token(path, "c", ["read"])
    with caplog.at_level(logging.INFO):
        look_twice(file)
    assert set(file.tokens) == {digest_of(third)}
    assert "loaded tokens count=1" in caplog.text
    assert all(secret not in caplog.text for secret in (first, second, third))


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    add_token(path, "a", ["read"])
    file = TokenFile(path)
    known = file.tokens
    secret = add_token(path, "b", ["read"])
    text = path.read_text()
    for half in ("", text[: text.index("[[token]]", 1)]):  # both are valid files
        path.write_text(half)
        file.reload()
        assert file.tokens is known
    path.write_text(text)
    look_twice(file)
    assert digest_of(secret) in file.tokens


def test_what_the_log_asks_for_is_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens.toml"
    add_token(path, "a", ["read"])
    file = TokenFile(path)
    secret = add_token(path, "b", ["read"])
    path.chmod(0o644)
    look_twice(file)
    look_twice(file)
    assert [each.levelname for each in caplog.records if "chmod 0600" in each.getMessage()] == ["ERROR"]
    path.chmod(0o600)  # after which the file looks as before, but for its mode
    file.reload()
    assert digest_of(secret) in file.tokens


_ADD_TEN = """
import sys
from pathlib import Path
from tq_service.server.credential_files import append_token, digest_of, make_token
for number in range(10):
    name = f"{sys.argv[2]}-{number}"
    append_token(Path(sys.argv[1]), make_token(name=name, sha256=digest_of(name), roles=["read"], prefixes=[""]))
"""


def test_tokens_that_are_added_at_once_are_all_there(tmp_path: Path) -> None:
    """By threads here and by other processes, as two operators or two jobs do it."""
    path = tmp_path / "tokens.toml"
    others = [subprocess.Popen([sys.executable, "-c", _ADD_TEN, str(path), f"process{one}"]) for one in range(3)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: append_token(path, token(f"thread{number}")), range(40)))
    assert [other.wait(timeout=60) for other in others] == [0, 0, 0]
    names = {each.name for each in read_tokens(path).values()}
    assert {name for name in names if "thread" in name} == {f"thread{number}" for number in range(40)}
    assert {name for name in names if "process" in name} == {f"process{n // 10}-{n % 10}" for n in range(30)}
    assert [each.name for each in tmp_path.iterdir()] == ["tokens.toml"]
