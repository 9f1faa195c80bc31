"""Credential files, read again when they are replaced: tokens, the certificate, the internal secret.

A token has 256 random bits and is stored as its SHA-256 digest. It cannot be guessed, so a slow hash would add no
security, and any client could keep the service busy with wrong tokens. Tokens are looked up by digest. A caller cannot
choose the digest of its token, so the duration of a look-up reveals nothing about stored tokens.

The services of one deployment share a secret, which distinguishes their calls from those of clients. Calls between
services carry a proof derived from the secret, never the secret itself. Other uses derive other values, and no value
reveals anything about another. If all services run on one machine and use only its loopback address, the file
needs no configuration. It is created in a directory of this user that no other user may enter.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import ssl
import stat
import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

import grpc
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from tq_service.config import ServeSettings, is_loopback
from tq_service.errors import InvalidArgumentError, nearest
from tq_service.log_message import LogMessage
from tq_service.wire.connection import ROLES, Credentials, Metadata, Role, Signature, file_signature, is_loopback_target

_log = logging.getLogger(__name__)
ALL_PARTITIONS: Final = ""

_MARK: Final = "tq_"  # lets secret scanners find a leaked token
_RANDOM_BYTES: Final = 32
INTERNAL_KEY: Final = "tq-internal"
"""Metadata key of the proof."""
SHORTEST_SECRET: Final = 32
_LONGEST_SECRET: Final = 4096
_CALLS: Final = "tq_service internal calls 1"
# Services notice a new file within about two seconds of each other. All accept both while some still send the old one.
_SEND_OLD_SECONDS: Final = 5.0
_ACCEPT_OLD_SECONDS: Final = 60.0


class ReloadingFiles(ABC):
    """Files that belong together; they are read once, and again after a change.

    Changed files are read once they are unchanged between two checks. A file that is written in place is empty for a
    moment, and an empty tokens file is valid. An error is logged once and the read is repeated at each check. Its cause
    may not show in the content: the mode of a file, or too many open files.

    Args:
        *paths: paths of the files; None for an unused one.
        what_stays: end of the log line of an error: the credentials in use until the files are valid.

    Raises:
        InvalidArgumentError: they cannot be used.
    """

    def __init__(self, *paths: Path | None, what_stays: str) -> None:
        self._paths = paths
        self._what_stays = what_stays
        self._taken = self._seen = self._signature()
        self._refused = ""
        self._read()

    def _signature(self) -> Signature:
        return tuple(map(file_signature, self._paths))

    @abstractmethod
    def _read(self) -> None:
        """Read the files and use them from now on; raises InvalidArgumentError if that fails."""

    def reload(self) -> None:
        """Read the files again if they have changed and are stable."""
        signature = self._signature()
        has_settled, self._seen = signature == self._seen, signature
        if not has_settled or signature == self._taken:
            return
        try:
            self._read()
        except InvalidArgumentError as error:
            if str(error) != self._refused:
                _log.error(LogMessage(f"could not use a changed file; {self._what_stays}", error=error))
            self._refused = str(error)
        else:
            self._taken, self._refused = signature, ""


def check_private(path: Path) -> None:
    """Refuse a file with secrets that others may read or change; its group may read it.

    Raises:
        OSError: the file does not exist.
        InvalidArgumentError: others may access it.
    """
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise InvalidArgumentError(
            f"got mode {stat.S_IMODE(mode):04o} of {path}, which lets others read or change it; chmod 0600 or 0640"
        )


class ServerCertificate(ReloadingFiles):
    """TLS credentials of a port that follow their files.

    At each handshake gRPC requests changes, on its own thread, and gets the last valid pair; open connections stay.
    Invalid files, such as a certificate whose key has not been replaced yet, are logged, and the previous pair stays in
    use.

    Args:
        cert: file of the certificate with its chain. All files are PEM.
        key: file of its private key, without a passphrase; others must not be able to read it.
        client_ca: file of certificate authorities; one of them must have signed the certificate of every client (mTLS).
            None: clients need no certificate.

    Attributes:
        context: TLS context for connections other than gRPC's; replaced when the files change.

    Raises:
        InvalidArgumentError: the files cannot be used.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        super().__init__(cert, key, client_ca, what_stays="the previous certificate stays in use")
        self._delivered = self._current

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials to open the port with."""
        return grpc.dynamic_ssl_server_credentials(
            self._current,
            self._changed,  # type: ignore[arg-type]  # grpc's own documentation has None for no change
            require_client_authentication=self._client_ca is not None,
        )

    def _read(self) -> None:
        try:
            check_private(self._key)
            contents = self._contents()
            # Python's ssl checks the pair: gRPC reports a problem only in its log, at the first handshake.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._cert, self._key, password=_no_passphrase)
            if self._client_ca is not None:
                check_authorities("tls_client_ca", self._client_ca)
                context.load_verify_locations(self._client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
            if contents != self._contents():
                raise InvalidArgumentError("they were replaced while they were read")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise InvalidArgumentError(f"TLS cannot use {self._cert} and {self._key}: {_why(error)}") from None
        key, cert, *client_ca = contents
        self._current = grpc.ssl_server_certificate_configuration([(key, cert)], *client_ca)
        self.context = context
        _log.info(LogMessage("loaded the certificate for new connections", path=self._cert))

    def _contents(self) -> list[bytes]:
        return [path.read_bytes() for path in (self._key, self._cert, self._client_ca) if path is not None]

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        # Only gRPC's threads write `_delivered` and only the loop writes `_current`, so no write is lost.
        current = self._current
        if current is self._delivered:
            return None
        self._delivered = current
        return current


def check_authorities(setting: str, path: Path) -> None:
    """Refuse a file of certificate authorities that cannot verify certificates.

    Raises:
        InvalidArgumentError: it cannot be read, or contains no certificates.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=path.read_bytes().decode("ascii"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgumentError(
            f"{setting} cannot be used: {path}: {reason}; expected certificates in PEM", field=setting
        ) from None


def _no_passphrase() -> str:
    raise InvalidArgumentError("the key has a passphrase; use one without, which only this user may read")


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


class Token(BaseModel):
    """The entry of a token in the file, which does not contain the token itself; created by `make_token`.

    Attributes:
        name: name of its holder, for logs.
        sha256: its digest.
        roles: permissions of the holder.
        prefixes: prefixes of the names of the partitions that it is valid for; "" means all.
        expires: end of its validity; None: it does not expire.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="1 to 64 letters, digits, '.', '_', '-'")
    sha256: str = Field(
        pattern="^[0-9a-f]{64}$",
        description="64 hexadecimal digits, as made by `tq-service token new`",
        repr=False,  # a user who confused the two has put the token itself here
    )
    roles: frozenset[Role] = Field(min_length=1, description=f"a list of at least one of {', '.join(ROLES)}")
    prefixes: tuple[str, ...] = Field(min_length=1, description="a list of at least one text ('' is all partitions)")
    expires: AwareDatetime | None = Field(
        default=None, strict=True, description="a time with its zone as 2027-01-31T00:00:00Z, without quotes"
    )

    @property
    def sorted_roles(self) -> list[Role]:
        """Its roles in the order of `ROLES`."""
        return sorted(self.roles, key=ROLES.index)

    def is_expired(self) -> bool:
        """Whether it has expired, by the clock of this machine."""
        return self.expires is not None and self.expires <= datetime.now(UTC)

    def covers(self, partition_id: str) -> bool:
        """Whether it is valid for a partition."""
        return partition_id.startswith(self.prefixes)


def new_secret() -> str:
    """Return a new token in the form that its holder sends."""
    return _MARK + secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(secret: str) -> str:
    """Return the digest that is stored for a token."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def make_token(**entry: object) -> Token:
    """Return the token of an entry.

    Raises:
        InvalidArgumentError: a value is wrong or missing.
    """
    try:
        return Token.model_validate(entry)
    except ValidationError as error:
        name = str(error.errors()[-1]["loc"][0])  # unknown keys come last
    field = Token.model_fields.get(name)
    if field is None:
        raise InvalidArgumentError(f"got the key {name!r:.80}, expected {', '.join(Token.model_fields)}")
    got = f"got {entry.get(name)!r:.80}, " if field.repr else ""
    raise InvalidArgumentError(f"{name}: {got}expected {field.description}")


def format_entry(token: Token) -> str:
    """Return the TOML entry of a token for the file."""
    lines = [
        "[[token]]",
        f"name = {_quote(token.name)}",
        f"sha256 = {_quote(token.sha256)}",
        f"roles = [{', '.join(map(_quote, token.sorted_roles))}]",
        f"prefixes = [{', '.join(map(_quote, token.prefixes))}]",
    ]
    if token.expires is not None:
        lines.append(f"expires = {token.expires.astimezone(UTC).isoformat(timespec='seconds')}")
    return "\n".join(lines) + "\n"


def parse_tokens(text: str) -> dict[str, Token]:
    """Return the tokens of a file by their digests.

    Raises:
        InvalidArgumentError: it is not TOML, an entry is wrong, or two entries have the same name or token.
    """
    try:
        document = tomllib.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"not TOML: {error}") from None
    entries = document.pop("token", [])
    if document or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidArgumentError("expected [[token]] entries and nothing else")
    tokens: dict[str, Token] = {}
    for number, entry in enumerate(entries, 1):
        try:
            token = make_token(**entry)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"entry {number} ({entry.get('name')!r:.80}): {error}") from None
        if token.sha256 in tokens or token.name in {each.name for each in tokens.values()}:
            raise InvalidArgumentError(f"entry {number}: the name {token.name!r} or its token occurs twice")
        tokens[token.sha256] = token
    return tokens


def read_tokens(path: Path) -> dict[str, Token]:
    """Return the tokens of a file by their digests.

    Raises:
        InvalidArgumentError: it cannot be read, others may access it, or its content is wrong.
    """
    try:
        check_private(path)
        return parse_tokens(path.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"the tokens file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # InvalidArgumentError, or bytes that are not text
        raise InvalidArgumentError(f"the tokens file {path}: {error}") from None


def append_token(path: Path, token: Token) -> None:
    """Add a token to a file, creating the file if needed. Readers see the old or the new content, never a part.

    Concurrent calls, in this process or another, wait for each other.

    Raises:
        InvalidArgumentError: the file is wrong, or already has a token of that name.
        OSError: it cannot be written.
    """
    with _locked(path):
        text = ""
        if path.exists():
            read_tokens(path)
            text = path.read_text()
        _replace(path, f"{text.rstrip()}\n\n{format_entry(token)}".lstrip())


def remove_token(path: Path, name: str) -> None:
    """Remove a token from a file; other entries and their comments are unchanged.

    Raises:
        InvalidArgumentError: the file is wrong, cannot be read, or has no token of that name.
        OSError: it cannot be written.
    """
    with _locked(path):
        tokens = read_tokens(path)
        names = [token.name for token in tokens.values()]
        if name not in names:
            raise InvalidArgumentError(f"{path} has no token {name!r}; {nearest(name, names)}", field="name")
        text = path.read_text()
        starts = [match.start() for match in re.finditer(r"^[ \t]*\[\[token\]\]", text, re.MULTILINE)]
        for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
            if [token.name for token in parse_tokens(text[start:end]).values()] == [name]:
                _replace(path, f"{text[:start]}{text[end:]}".rstrip() + "\n")
                return
        raise InvalidArgumentError(
            f"the tokens file {path}: the entry of {name!r} is not a separate [[token]] table; remove it by hand"
        )


def _replace(path: Path, text: str) -> None:
    """Replace a tokens file."""
    parse_tokens(text)
    unready = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(unready, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            status = path.stat()
            unready.chmod(stat.S_IMODE(status.st_mode))
            if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(unready, status.st_uid, status.st_gid)
        unready.rename(path)
    except BaseException:
        unready.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock on the directory of a file: the file itself is replaced, so a lock on it would be lost."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class TokenFile(ReloadingFiles):
    """The current tokens of a file. An invalid new file is logged, and the previous tokens stay valid.

    Args:
        path: the file.

    Attributes:
        tokens: tokens by digest; a new mapping each time the file is read.

    Raises:
        InvalidArgumentError: it cannot be read, others may access it, or its content is wrong.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tokens: Mapping[str, Token] = {}
        super().__init__(path, what_stays="the previous tokens stay valid")

    def _read(self) -> None:
        self.tokens = read_tokens(self._path)
        _log.info(LogMessage("read tokens", count=len(self.tokens), path=self._path))


def _quote(text: str) -> str:
    """Return a text quoted in a way that is valid in TOML and JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class InternalSecret(ReloadingFiles):
    """The current secret of a file. An invalid new file is logged, and the previous secret stays in use.

    Confined to one event loop.

    Args:
        path: the file.
        is_made: whether the file is created if it is missing, and again if it disappears. If several services start at
            the same moment, one creates it and all read that file.
        is_own: whether only this user may have access to the file and its directory, because all users may create files
            next to it. If false, others must not be able to read it.
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
        super().__init__(path, what_stays="the previous internal secret stays in use")

    @property
    def proof(self) -> str:
        """The proof that calls to other services carry."""
        is_new = bool(self._old_proof) and self._clock() - self._renewed_at < _SEND_OLD_SECONDS
        return self._old_proof if is_new else self._proof

    def accepts(self, proof: str) -> bool:
        """Whether a call comes from a service with the same secret, or, for a minute, with the previous one."""
        given = proof.encode("utf-8", "replace")
        is_present = hmac.compare_digest(given, self._proof.encode())
        is_old = bool(self._old_proof) and self._clock() - self._renewed_at < _ACCEPT_OLD_SECONDS
        return is_present | (is_old & hmac.compare_digest(given, self._old_proof.encode()))

    def derive(self, purpose: str) -> bytes:
        """Return 32 bytes for one purpose; they reveal neither the secret nor the bytes for other purposes."""
        return hmac.new(self._secret, purpose.encode(), hashlib.sha256).digest()

    def reload(self) -> None:
        """Read the file again if it has changed and is stable."""
        # A cleaner of temporary files may have removed it, and other services need it.
        if self._is_made and file_signature(self._path) is None:
            try:
                self._publish(self._secret + b"\n")
            except InvalidArgumentError as error:
                _log.debug(LogMessage("could not write the internal secret again", path=self._path, error=error))
        super().reload()

    def _read(self) -> None:
        try:
            secret = self._checked()
        except OSError as error:
            advice = "" if self._is_made else "; copy the controller's secret to this path"
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
            InvalidArgumentError: others may access it, or it contains no valid secret.
        """
        if self._is_own:
            self._check_directory()
        else:
            check_private(self._path)
        # O_NONBLOCK: do not wait if somebody has put a pipe there.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if self._is_own else 0)
        with open(os.open(self._path, flags), "rb") as file:  # noqa: PTH123  (a descriptor)
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgumentError(
                    f"the internal secret {self._path} is not a regular file", field="internal_secret_file"
                )
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

    def _check_directory(self) -> None:
        directory = self._path.parent
        _check_own(directory, directory.stat(follow_symlinks=False), stat.S_ISDIR)

    def _publish(self, content: bytes) -> None:
        """Create the file atomically, readable only by this user, unless it exists by now."""
        try:
            if self._is_own:
                self._path.parent.mkdir(mode=0o700, exist_ok=True)
                self._check_directory()
            with NamedTemporaryFile(dir=self._path.parent, prefix=f".{self._path.name}.") as file:  # of mode 0600
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.link(file.name, self._path)
        except FileExistsError:
            return  # another service created it first; all read that file
        except OSError as error:
            raise InvalidArgumentError(
                f"the internal secret {self._path} does not exist and could not be created ({error.strerror}); set "
                "internal_secret_file to a file that the services of this deployment share",
                field="internal_secret_file",
            ) from None
        _log.info(LogMessage("created the internal secret that the services of this deployment share", path=self._path))


class ServiceCredentials(Credentials):
    """Credentials of a service towards other services: its token, its certificate, and the proof of the secret.

    Attributes:
        secret: the internal secret, or None.
    """

    secret: InternalSecret | None = None

    @property
    def sent_secret(self) -> str:
        """Name of the secret that a plaintext connection would reveal; "" for none."""
        return super().sent_secret or ("the proof of the internal secret" if self.secret is not None else "")

    def metadata(self) -> Metadata | None:
        """Return the metadata with token and proof.

        Raises:
            UnauthenticatedError: the token file cannot be used.
        """
        metadata = super().metadata()
        return metadata if self.secret is None else (*(metadata or ()), (INTERNAL_KEY, self.secret.proof))


def find_secret(settings: ServeSettings, *, has_tokens: bool) -> InternalSecret | None:
    """Return the internal secret of a service, or None if it does not need one.

    Args:
        settings: settings of the service.
        has_tokens: whether it requires tokens and has one itself; tokens also identify services to each other.

    Raises:
        InvalidArgumentError: it needs a secret that is missing or cannot be used.
    """
    if settings.internal_secret_file is not None:
        return InternalSecret(settings.internal_secret_file, is_made=settings.role != "storage")
    if has_tokens:
        return None
    targets = (settings.advertise, settings.controller)
    # It listens on, advertises and dials only this machine's loopback address.
    if is_loopback(settings.host) and all(target is None or is_loopback_target(target) for target in targets):
        try:
            return InternalSecret(own_secret_path(), is_made=True, is_own=True)
        except InvalidArgumentError as error:
            if settings.role != "all":
                raise
            _log.warning(LogMessage("other storage services cannot join this service", error=error))
            return None
    if settings.role == "all":
        return None
    raise InvalidArgumentError(
        f"a service of role {settings.role} must tell calls of the other services from those of clients: give all "
        "services the same internal_secret_file (--internal-secret-file, TQ_INTERNAL_SECRET_FILE; create it with "
        "`openssl rand -hex 32`), or give each an auth_tokens_file and a peer_token_file with a token of role service "
        "(docs/security.md)",
        field="internal_secret_file",
    )


def own_secret_path() -> Path:
    """Return the default path of the secret of this user's services on this machine."""
    directory = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  (owner and mode are checked)
    return Path(directory) / f"tq_service-internal-{os.geteuid()}" / "secret"


def _check_own(path: Path, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if is_kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return
    raise InvalidArgumentError(
        f"{path} is not private to this user (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}), so "
        "others could pass for a service; remove it, or set internal_secret_file to a file that the services share",
        field="internal_secret_file",
    )
