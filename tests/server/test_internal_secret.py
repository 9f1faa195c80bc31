"""The file of the internal secret: found or made by all services alike, and refused where others could have made it."""

from __future__ import annotations

import os
import pickle
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tq_service.errors import InvalidArgumentError
from tq_service.server import credential_files
from tq_service.server.credential_files import (
    INTERNAL_KEY,
    InternalSecret,
    ServiceCredentials,
    own_secret_path,
)

SECRET = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where services of this machine look, in an empty directory for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return own_secret_path()


def own() -> InternalSecret:
    return InternalSecret(own_secret_path(), is_made=True, is_own=True)


def given(path: Path, content: bytes = SECRET, mode: int = 0o600) -> Path:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_services_that_start_at_the_same_moment_find_one_secret(path: Path) -> None:
    for _ in range(20):
        together, proofs = threading.Barrier(8), []

        def start(together: threading.Barrier = together, proofs: list[str] = proofs) -> None:
            together.wait()
            proofs.append(own().proof)

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(proofs) == 8
        assert len(set(proofs)) == 1
        assert [each.name for each in path.parent.iterdir()] == ["secret"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        path.unlink()


def test_the_proof_is_neither_the_secret_nor_what_others_derive_from_it(tmp_path: Path) -> None:
    secret = InternalSecret(given(tmp_path / "a", SECRET), is_made=False)
    same = InternalSecret(given(tmp_path / "b", SECRET + b"\n"), is_made=False)
    other = InternalSecret(given(tmp_path / "c", SECRET[::-1]), is_made=False)
    assert secret.accepts(same.proof)
    assert not secret.accepts(other.proof)
    for wrong in ("", "x", SECRET.decode(), SECRET.hex(), secret.proof[:-1], secret.proof + "0", "\u00e4" * 64,
                  secret.derive("receipts").hex()):  # fmt: skip
        assert not secret.accepts(wrong)
    assert secret.derive("receipts") == same.derive("receipts") != other.derive("receipts")


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o644, 0o606, 0o777])
def test_a_file_of_its_own_that_others_may_read_or_write_is_refused(path: Path, mode: int) -> None:
    given(path, mode=mode)
    with pytest.raises(InvalidArgumentError, match=f"secret is not private to this user .*mode {mode:04o}"):
        own()


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o755, 0o777])
def test_a_directory_that_others_may_enter_is_refused(path: Path, mode: int) -> None:
    given(path).parent.chmod(mode)
    with pytest.raises(InvalidArgumentError, match="not private to this user"):
        own()


def test_what_another_user_has_put_there_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(path)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)  # seen from another user, what is there is this one's
    with pytest.raises(InvalidArgumentError, match=f"owner {user},"):
        InternalSecret(path, is_made=True, is_own=True)
    path.unlink()
    with pytest.raises(InvalidArgumentError, match=f"owner {user},"):
        InternalSecret(path, is_made=True, is_own=True)
    assert list(path.parent.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_that_another_user_owns_is_refused(path: Path) -> None:
    os.chown(given(path), 12345, -1)
    with pytest.raises(InvalidArgumentError, match="owner 12345"):
        own()


def test_links_are_refused_where_all_users_may_make_them(path: Path, tmp_path: Path) -> None:
    given(tmp_path / "elsewhere" / "secret")
    path.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidArgumentError, match="not private to this user"):
        own()
    path.parent.unlink()
    path.parent.mkdir(mode=0o700)
    path.symlink_to(tmp_path / "elsewhere" / "secret")
    with pytest.raises(InvalidArgumentError, match="could not read the internal secret"):
        own()


@pytest.mark.parametrize("content", [b"", b"\n", b"  \n\n", b"x" * 31, b" " * 40 + b"short\n", b"x" * 4097])
def test_what_is_no_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="expected 32 to 4096"):
        InternalSecret(given(tmp_path / "secret", content), is_made=True)


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o644, 0o660])
def test_a_given_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(InvalidArgumentError, match="chmod 0600 or 0640"):
        InternalSecret(given(tmp_path / "secret", mode=mode), is_made=False)


def test_a_given_file_may_be_a_link_that_its_group_reads(tmp_path: Path) -> None:
    """As Kubernetes mounts secrets."""
    given(tmp_path / "..data", mode=0o440)
    (tmp_path / "secret").symlink_to("..data")
    assert InternalSecret(tmp_path / "secret", is_made=False).proof


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, message in (
        ("pipe", "is not a regular file"),
        ("missing", "copy the controller's secret"),
        (".", "other users may read"),
    ):
        (tmp_path / name).chmod(0o600 if name == "pipe" else 0o755) if name != "missing" else None
        with pytest.raises(InvalidArgumentError, match=message):
            InternalSecret(tmp_path / name, is_made=False)


def test_a_file_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"could not be created .*Set internal_secret_file"):
        InternalSecret(tmp_path / "missing" / "secret", is_made=True)


def test_a_file_that_a_cleaner_has_removed_comes_back_the_same(path: Path) -> None:
    first, second = own(), own()
    path.unlink()
    path.parent.rmdir()
    first.reload()
    assert own().proof == first.proof == second.proof
    for _ in range(3):
        second.reload()
    assert second.proof == first.proof


def renewed(secret: InternalSecret, path: Path) -> Callable[[bytes], None]:
    def renew(content: bytes) -> None:
        given(path.with_suffix(".new"), content).rename(path)
        secret.reload()
        secret.reload()

    return renew


def test_a_new_secret_is_accepted_beside_the_old_one_for_a_while(tmp_path: Path) -> None:
    now = 1000.0
    path = given(tmp_path / "secret")
    secret = InternalSecret(path, is_made=False, clock=lambda: now)
    old = secret.proof
    renewed(secret, path)(SECRET[::-1])
    new = InternalSecret(path, is_made=False).proof
    assert secret.accepts(old)
    assert secret.accepts(new)
    assert secret.proof == old  # others may not have read the new one yet
    now += credential_files._SEND_OLD_SECONDS
    assert secret.proof == new
    now += credential_files._ACCEPT_OLD_SECONDS
    assert not secret.accepts(old)
    assert secret.accepts(new)


def test_a_broken_new_file_is_logged_and_the_secret_before_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = given(tmp_path / "secret")
    secret = InternalSecret(path, is_made=False)
    proof = secret.proof
    renewed(secret, path)(b"short")
    path.unlink()
    for _ in range(3):
        secret.reload()
    assert secret.proof == proof
    assert secret.accepts(proof)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "stays in use" in caplog.text


def test_the_proof_goes_in_plaintext_to_this_machine_only_and_into_no_text(tmp_path: Path) -> None:
    secret = InternalSecret(given(tmp_path / "secret"), is_made=False)
    credentials, insecure = ServiceCredentials(None, None, insecure=False), ServiceCredentials(insecure=True)
    credentials.secret = insecure.secret = secret
    assert credentials.metadata() == ((INTERNAL_KEY, secret.proof),)
    credentials.check_target("localhost:50051")
    with pytest.raises(
        InvalidArgumentError, match="the proof of the internal secret would be sent to far:1 in plaintext"
    ):
        credentials.check_target("far:1")
    insecure.check_target("far:1")
    for text in (repr(credentials).encode(), pickle.dumps(credentials)):
        assert secret.proof.encode() not in text
        assert SECRET not in text
