"""`tq-service token`: what it makes, shows and refuses."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tq_service as tq
from tq_service.cli import app
from tq_service.server.credential_files import digest_of, parse_tokens, read_tokens


def run(*arguments: object) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["token", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_without_a_file_the_token_and_its_entry_are_printed() -> None:
    secret, entry = run("new", "--name", "a", "--role", "produce", "--role", "read", "--prefix", "x@", "--prefix", "y")
    tokens = parse_tokens(entry)
    token = tokens[digest_of(secret.strip())]
    assert (token.name, token.roles, token.prefixes) == ("a", {"produce", "read"}, ("x@", "y"))
    assert secret.strip() not in entry


def test_tokens_are_added_to_a_file_and_listed(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    secret, told = run("new", "--name", "a", "--role", "admin", "--file", path)
    run("new", "--name", "old", "--role", "read", "--expires", "2020-01-01", "--file", path)
    assert told == f"added to {path}: a\n"
    assert secret.strip() not in path.read_text()
    (first, second) = json.loads(run("ls", "--file", path, "--json")[0])
    assert first == {"name": "a", "roles": ["admin"], "prefixes": [""], "expires": None, "is_expired": False}
    assert (second["expires"], second["is_expired"]) == ("2020-01-01T00:00:00+00:00", True)
    table = run("ls", "--file", path)[0]
    assert "(all)" in table
    assert "(expired)" in table


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2027-01-31T12:00+02:00", datetime(2027, 1, 31, 10, tzinfo=UTC)),
        ("2027-01-31T12:00", datetime(2027, 1, 31, 12, tzinfo=UTC)),
        ("90d", None),
        ("12h", None),
    ],
)
def test_ends(text: str, expected: datetime | None, tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    run("new", "--name", "a", "--role", "read", "--expires", text, "--file", path)
    (token,) = read_tokens(path).values()
    assert token.expires is not None
    if expected is None:
        span = timedelta(days=90) if text == "90d" else timedelta(hours=12)
        assert abs(token.expires - datetime.now(UTC) - span) < timedelta(minutes=5)
    else:
        assert token.expires == expected


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--name", "a b", "--role", "read"), "name: got 'a b'"),
        (("--name", "a", "--role", "boss"), r"roles: got \['boss'\]"),
        (("--name", "a", "--role", "read", "--expires", "soon"), "--expires: got 'soon'"),
        (("--name", "a", "--role", "read", "--expires", "99999999999d"), "--expires: got '99999999999d'"),
    ],
)
def test_wrong_arguments_make_nothing(arguments: tuple[str, ...], match: str, tmp_path: Path) -> None:
    files = ("--file", tmp_path / "tokens.toml", "--output", tmp_path / "a.token")
    with pytest.raises(tq.errors.InvalidArgumentError, match=match):
        run("new", *arguments, *files)
    assert list(tmp_path.iterdir()) == []


def test_a_token_file_is_not_overwritten_and_goes_where_the_entry_cannot_be_added(tmp_path: Path) -> None:
    path, output = tmp_path / "tokens.toml", tmp_path / "a.token"
    run("new", "--name", "a", "--role", "read", "--file", path, "--output", output)
    assert output.stat().st_mode & 0o777 == 0o600
    before = output.read_text(), path.read_text()
    with pytest.raises(tq.errors.AlreadyExistsError, match="already exists"):
        run("new", "--name", "b", "--role", "read", "--file", path, "--output", output)
    with pytest.raises(tq.errors.InvalidArgumentError, match="of an earlier entry"):
        run("new", "--name", "a", "--role", "read", "--file", path, "--output", tmp_path / "b.token")
    assert (output.read_text(), path.read_text()) == before
    assert not (tmp_path / "b.token").exists()


@pytest.mark.parametrize("option", ["--file", "--output"])
def test_a_file_that_cannot_be_written_is_named(option: str, tmp_path: Path) -> None:
    files = {"--file": tmp_path / "tokens.toml", "--output": tmp_path / "a.token", option: tmp_path / "no" / "file"}
    with pytest.raises(tq.errors.InvalidArgumentError, match=f"{option}: could not write .*/no/file: No such file"):
        run("new", "--name", "a", "--role", "read", *(part for pair in files.items() for part in pair))
    assert list(tmp_path.iterdir()) == []


def test_a_list_takes_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_AUTH_TOKENS_FILE", raising=False)
    with pytest.raises(tq.errors.InvalidArgumentError, match="no token file specified"):
        run("ls")


def test_a_revoked_token_goes_and_all_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    for name in ("a", "b", "c"):
        run("new", "--name", name, "--role", "read", "--file", path)
    path.write_text(f"# ours\n{path.read_text()}")
    path.chmod(0o640)
    before = read_tokens(path)
    assert run("revoke", "b", "--file", path)[0] == f"removed from {path}: b\n"
    assert path.read_text().startswith("# ours\n")
    assert path.stat().st_mode & 0o777 == 0o640
    after = read_tokens(path)
    assert [token.name for token in after.values()] == ["a", "c"]
    assert after.items() <= before.items()
    with pytest.raises(tq.errors.InvalidArgumentError, match="has no token 'b'; known: 'a', 'c'"):
        run("revoke", "b", "--file", path)
    assert json.loads(run("revoke", "c", "--file", path, "--json")[0]) == {"name": "c", "file": str(path)}
    assert list(read_tokens(path).values()) == [next(iter(before.values()))]
