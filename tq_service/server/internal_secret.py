"""The secret that the services of one deployment share, by which they know each other's calls from those of clients.

It is a file. Calls between services carry a proof, a value derived from the secret, never the secret itself, so that
other uses can derive other values from it and none reveals anything of the others.

Where everything is on one machine and reached by its loopback address alone, the file is made and found by itself: in
a directory of this user, which no other user may enter.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

from tq_service.config import ServeSettings, is_loopback
from tq_service.errors import InvalidArgumentError
from tq_service.log_message import LogMessage
from tq_service.server.reloading_files import ReloadingFiles, check_private
from tq_service.wire.credentials import Credentials, Metadata, file_signature, is_loopback_target

_log = logging.getLogger(__name__)

INTERNAL_KEY: Final = "tq-internal"
"""Metadata key of the proof."""
SHORTEST_SECRET: Final = 32
_LONGEST_SECRET: Final = 4096
_RANDOM_BYTES: Final = 32
_CALLS: Final = "tq_service internal calls 1"
# Services notice a new file within some two seconds of each other: all accept both while some still send the old one.
_SEND_OLD_SECONDS: Final = 5.0
_ACCEPT_OLD_SECONDS: Final = 60.0


class InternalSecret(ReloadingFiles):
    """The secret in a file as it is now. A broken new file is logged, and the secret read before stays.

    Confined to one event loop.

    Args:
        path: the file.
        is_made: whether it is made where it is missing, and again where it disappears; of services that are started at
            the same moment one makes it and all read that one.
        is_own: whether it and its directory must be of this user alone, as it is in a place where all users may make
            files; else others must not be able to read it.
        clock: monotonic, in seconds.

    Raises:
        InvalidArgumentError: it cannot be used.
    """

    def __init__(
        self, path: Path, *, is_made: bool, is_own: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._is_made = is_made
        self._is_own = is_own
        self._clock = clock
        self._secret = b""
        self._proof = self._old_proof = ""
        self._renewed_at = 0.0
        if is_made and file_signature(path) is None:
            self._publish(secrets.token_hex(_RANDOM_BYTES).encode() + b"\n")
        super().__init__(path, what_stays="the internal secret read before stays in use")

    @property
    def proof(self) -> str:
        """What calls to other services carry."""
        is_new = bool(self._old_proof) and self._clock() - self._renewed_at < _SEND_OLD_SECONDS
        return self._old_proof if is_new else self._proof

    def accepts(self, proof: str) -> bool:
        """Whether a call comes from a service with the same secret, or the one before it for a minute."""
        given = proof.encode("utf-8", "replace")
        is_present = hmac.compare_digest(given, self._proof.encode())
        is_old = bool(self._old_proof) and self._clock() - self._renewed_at < _ACCEPT_OLD_SECONDS
        return is_present | (is_old & hmac.compare_digest(given, self._old_proof.encode()))

    def derive(self, purpose: str) -> bytes:
        """Return 32 bytes for one purpose, from which neither the secret nor those for others can be found."""
        return hmac.new(self._secret, purpose.encode(), hashlib.sha256).digest()

    def reload(self) -> None:
        """Read the file again if it has changed since, and no longer changes."""
        if self._is_made and file_signature(self._path) is None:  # a cleaner of temporary files; other services need it
            try:
                self._publish(self._secret + b"\n")
            except InvalidArgumentError as error:
                _log.debug(LogMessage("the internal secret cannot be written again", path=self._path, error=error))
        super().reload()

    def _read(self) -> None:
        try:
            secret = self._checked()
        except OSError as error:
            advice = "" if self._is_made else "; copy that of the controller there"
            raise InvalidArgumentError(
                f"the internal secret {self._path} cannot be read: {error.strerror}{advice}",
                field="internal_secret_file",
            ) from None
        if secret == self._secret:
            return
        if self._secret:
            self._old_proof, self._renewed_at = self._proof, self._clock()
            _log.info(LogMessage("read a new internal secret", path=self._path))
        self._secret = secret
        self._proof = self.derive(_CALLS).hex()

    def _checked(self) -> bytes:
        """Return the secret.

        Raises:
            OSError: the file cannot be read.
            InvalidArgumentError: it is open to others, or holds no secret.
        """
        if self._is_own:
            _check_own_directory(self._path.parent)
        else:
            check_private(self._path)
        # Not to wait where somebody has put a pipe there.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if self._is_own else 0)
        with open(os.open(self._path, flags), "rb") as file:  # noqa: PTH123  (a descriptor)
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgumentError(f"the internal secret {self._path} is no file", field="internal_secret_file")
            if self._is_own:
                _check_own(self._path, status, stat.S_ISREG)
            secret = file.read(_LONGEST_SECRET + 1).strip()
        if not SHORTEST_SECRET <= len(secret) <= _LONGEST_SECRET:
            raise InvalidArgumentError(
                f"the internal secret {self._path} has {len(secret)} characters, expected {SHORTEST_SECRET} to "
                f"{_LONGEST_SECRET}, such as `openssl rand -hex 32` prints",
                field="internal_secret_file",
            )
        return secret

    def _publish(self, content: bytes) -> None:
        """Put the file into its place, whole and readable by this user alone, unless there is one by now."""
        try:
            if self._is_own:
                self._path.parent.mkdir(mode=0o700, exist_ok=True)
                _check_own_directory(self._path.parent)
            with NamedTemporaryFile(dir=self._path.parent, prefix=f".{self._path.name}.") as file:  # of mode 0600
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.link(file.name, self._path)
        except FileExistsError:
            return  # another service was first, and has made what all read
        except OSError as error:
            raise InvalidArgumentError(
                f"the internal secret {self._path} is not there and cannot be made ({error.strerror}); set "
                "internal_secret_file to a file that the services of this deployment share",
                field="internal_secret_file",
            ) from None
        _log.info(LogMessage("created the internal secret that the services of this deployment share", path=self._path))


class ServiceCredentials(Credentials):
    """What a service shows to other services: its token, its certificate, and the proof of the internal secret.

    Attributes:
        secret: the internal secret, None without one.
    """

    secret: InternalSecret | None = None

    @property
    def sent_secret(self) -> str:
        """What others could read on the way, "" for nothing."""
        return super().sent_secret or ("the proof of the internal secret" if self.secret is not None else "")

    def metadata(self) -> Metadata | None:
        """Return the metadata that carries token and proof.

        Raises:
            UnauthenticatedError: the token's file cannot be used.
        """
        metadata = super().metadata()
        return metadata if self.secret is None else (*(metadata or ()), (INTERNAL_KEY, self.secret.proof))


def find_secret(settings: ServeSettings, *, has_tokens: bool) -> InternalSecret | None:
    """Return the internal secret of a service, None for one that needs none.

    Args:
        settings: how it runs.
        has_tokens: whether it asks for tokens and has one of its own, by which services know each other as well.

    Raises:
        InvalidArgumentError: it needs one and there is none, or the one that there is cannot be used.
    """
    if settings.internal_secret_file is not None:
        return InternalSecret(settings.internal_secret_file, is_made=settings.role != "storage")
    if has_tokens:
        return None
    if _is_within_this_machine(settings):
        try:
            return InternalSecret(own_secret_path(), is_made=True, is_own=True)
        except InvalidArgumentError as error:
            if settings.role != "all":
                raise
            _log.warning(LogMessage("no further storage service can join this one", error=error))
            return None
    if settings.role == "all":
        return None
    raise InvalidArgumentError(
        f"a service of role {settings.role} and the others of its deployment must know each other from clients: give "
        "all of them the same internal_secret_file (--internal-secret-file, TQ_INTERNAL_SECRET_FILE; `openssl rand "
        "-hex 32` makes what it holds), or each an auth_tokens_file and a peer_token_file with a token of role service "
        "(docs/security.md)",
        field="internal_secret_file",
    )


def own_secret_path() -> Path:
    """Return where the services of this user on this machine find their secret."""
    directory = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  (what is there is checked to be this user's alone)
    return Path(directory) / f"tq_service-internal-{os.geteuid()}" / "secret"


def _is_within_this_machine(settings: ServeSettings) -> bool:
    """Whether a service listens on, advertises and dials this machine's loopback address alone."""
    targets = (settings.advertise, settings.controller)
    return is_loopback(settings.host) and all(target is None or is_loopback_target(target) for target in targets)


def _check_own_directory(directory: Path) -> None:
    _check_own(directory, directory.stat(follow_symlinks=False), stat.S_ISDIR)


def _check_own(path: Path, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if is_kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return
    raise InvalidArgumentError(
        f"{path} is not of this user alone (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}), so "
        "others could pass for a service; remove it, or set internal_secret_file to a file that the services share",
        field="internal_secret_file",
    )
