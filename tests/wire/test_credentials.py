"""What clients show: where it comes from, and that secrets stay where they are."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

import tq_service as tq
from tq_service.wire import connection as module
from tq_service.wire.connection import Credentials, Tls, is_loopback_target

SECRET = "tq_secret"
SHOWN = (("authorization", f"Bearer {SECRET}"),)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TQ_")]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{SECRET}\n")
    return path


def test_without_anything_nothing_is_shown() -> None:
    assert Credentials().metadata() is None
    assert Credentials().tls is None
    Credentials().check_target("far.example:1")


def test_a_token_comes_from_the_argument_then_its_variable_then_its_file(
    monkeypatch: pytest.MonkeyPatch, token_file: Path
) -> None:
    monkeypatch.setenv("TQ_TOKEN_FILE", str(token_file))
    assert Credentials().metadata() == SHOWN
    monkeypatch.setenv("TQ_TOKEN", "tq_variable")
    assert Credentials().metadata() == (("authorization", "Bearer tq_variable"),)
    assert Credentials("tq_argument").metadata() == (("authorization", "Bearer tq_argument"),)
    assert Credentials(token_file).metadata() == SHOWN


def test_none_at_all_is_said_by_false(monkeypatch: pytest.MonkeyPatch, token_file: Path) -> None:
    monkeypatch.setenv("TQ_TOKEN", "tq_variable")
    monkeypatch.setenv("TQ_TOKEN_FILE", str(token_file))
    monkeypatch.setenv("TQ_TLS_CA", "/ca")
    client = tq.Client("localhost:1", token=False, tls=False)
    for credentials in (client._credentials, pickle.loads(pickle.dumps(client))._credentials):
        assert (credentials.metadata(), credentials.tls) == (None, None)


def test_a_token_file_is_read_again_when_it_changes(monkeypatch: pytest.MonkeyPatch, token_file: Path) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    credentials = Credentials(token_file)
    assert credentials.metadata() == SHOWN
    token_file.with_suffix(".new").write_text("tq_other")
    token_file.with_suffix(".new").rename(token_file)
    assert credentials.metadata() == SHOWN
    now += 2
    assert credentials.metadata() == (("authorization", "Bearer tq_other"),)
    token_file.write_text("")
    now += 2
    assert credentials.metadata() == (("authorization", "Bearer tq_other"),)
    token_file.unlink()
    now += 2
    assert credentials.metadata() == (("authorization", "Bearer tq_other"),)
    with pytest.raises(tq.errors.UnauthenticatedError, match="could not read a token"):
        Credentials(token_file).metadata()


@pytest.mark.parametrize("text", ["", " ", "two words", "tq_\n x", "tq_\x00", "t\u00e4q"])
def test_what_is_no_token_is_refused_without_being_told(text: str) -> None:
    with pytest.raises(tq.errors.InvalidArgumentError, match="does not contain a token") as caught:
        Credentials(text)
    assert not text.strip() or text not in str(caught.value)


def test_tls_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_TLS_CA", "/ca")
    assert Credentials().tls == Tls(ca="/ca")
    monkeypatch.setenv("TQ_TLS_CERT", "/cert")
    with pytest.raises(tq.errors.InvalidArgumentError, match="one of cert and key"):
        Credentials()
    monkeypatch.setenv("TQ_TLS_KEY", "/key")
    assert Credentials().tls == Tls(ca="/ca", cert="/cert", key="/key")
    assert Credentials(tls=Tls(ca="/mine")).tls == Tls(ca="/mine")
    with pytest.raises(tq.errors.InvalidArgumentError, match="could not read /ca: No such file"):
        Tls(ca="/ca").channel_credentials()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost:1", True),
        ("127.0.0.1:1", True),
        ("127.9.9.9", True),
        ("[::1]:1", True),
        ("dns:///localhost:1", True),
        ("unix:/run/tq", True),
        ("far.example:1", False),
        ("localhost.example:1", False),
        ("10.0.0.1:1", False),
        ("dns:///127.0.0.1.example:1", False),
        ("", False),
    ],
)
def test_which_addresses_are_on_this_machine(address: str, expected: bool) -> None:
    assert is_loopback_target(address) is expected


def test_a_token_goes_to_other_machines_in_tls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    Credentials(SECRET).check_target("localhost:1")
    with pytest.raises(tq.errors.InvalidArgumentError, match=r"far.example:1 in plaintext.*TQ_INSECURE") as caught:
        Credentials(SECRET).check_target("far.example:1")
    assert SECRET not in str(caught.value)
    Credentials(SECRET, Tls()).check_target("far.example:1")
    Credentials(SECRET, insecure=True).check_target("far.example:1")
    monkeypatch.setenv("TQ_INSECURE", "true")
    Credentials(SECRET).check_target("far.example:1")
    with pytest.raises(tq.errors.InvalidArgumentError):
        Credentials(SECRET, insecure=False).check_target("far.example:1")


def test_clients_refuse_before_they_connect() -> None:
    with (
        tq.Client("far.example:1", token=SECRET) as client,
        pytest.raises(tq.errors.InvalidArgumentError, match="plaintext"),
    ):
        client.list_partitions()


@pytest.mark.parametrize("kind", [tq.Client, tq.AsyncClient])
def test_secrets_are_neither_in_the_pickle_nor_in_the_repr(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    client = kind("localhost:1", 5.0, token=SECRET, tls=Tls(ca="/ca"), insecure=True)
    data = pickle.dumps(client)
    assert SECRET.encode() not in data
    assert SECRET not in repr(client) + repr(client._credentials)
    monkeypatch.setenv("TQ_TOKEN", "tq_there")
    again = pickle.loads(data)
    assert (again.address, again.timeout) == ("localhost:1", 5.0)
    assert again._credentials.tls == Tls(ca="/ca")
    assert again._credentials.metadata() == (("authorization", "Bearer tq_there"),)


def test_a_pickle_keeps_the_path_of_a_token(token_file: Path) -> None:
    client = pickle.loads(pickle.dumps(tq.Client("localhost:1", token=token_file)))
    assert client._credentials.metadata() == SHOWN
