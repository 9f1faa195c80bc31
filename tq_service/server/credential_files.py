"""Files with credentials: tokens, the certificate, and the internal secret. The files are reloaded when they change.

A token has 256 random bits and is stored as its SHA-256 digest. Because tokens cannot be guessed, a slow hash would add
no protection and would let clients overload the service with invalid tokens. Tokens are looked up by digest. Callers
cannot choose a token's digest, so the duration of a lookup reveals nothing about the stored tokens.

The services of a deployment share an internal secret, which distinguishes calls by services from calls by clients.
Services never send the secret itself. Instead, services send a proof derived from the secret. A separate value is
derived for each purpose, and no derived value reveals any other. If all services run on one machine and use only its
loopback address, the secret does not need to be configured. The first service then creates the secret file in a
directory that only its user can access.
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
"""Key of the metadata with which a calling service proves that it knows the internal secret."""
SHORTEST_SECRET: Final = 32
_LONGEST_SECRET: Final = 4096
_CALLS: Final = "tq_service internal calls 1"
# Services do not notice a new secret file at the same time, so they send and accept the old proof for a while.
_SEND_OLD_SECONDS: Final = 5.0
_ACCEPT_OLD_SECONDS: Final = 60.0


class ReloadingFiles(ABC):
    """A set of files that is loaded at startup and reloaded after changes.

    Changed files are reloaded only after two consecutive checks have found them in the same state. Otherwise, a tokens
    file that is being written in place could be read while it is still empty, and an empty tokens file is valid. Each
    error is logged only once. After an error, each check retries the load, because the cause may not be in the files.
    For example, the process may have too many open files.

    Args:
        *paths: path of each file, or None for a file that is not used.
        what_stays: final clause of each logged error, which states what remains in use until the files are valid.

    Raises:
        InvalidArgumentError: the files are unusable.
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
        """Load the files and apply their contents. Raise InvalidArgumentError if the files are unusable."""

    def reload(self) -> None:
        """Reload the files if they have changed and are no longer being written."""
        signature = self._signature()
        has_settled, self._seen = signature == self._seen, signature
        if not has_settled or signature == self._taken:
            return
        try:
            self._read()
        except InvalidArgumentError as error:
            if str(error) != self._refused:
                _log.error(LogMessage(f"could not load the changed files; {self._what_stays}", error=error))
            self._refused = str(error)
        else:
            self._taken, self._refused = signature, ""


def check_private(path: Path) -> None:
    """Reject a secret file that other users may read or change. Read access by the file's group is allowed.

    Raises:
        OSError: the file does not exist.
        InvalidArgumentError: other users can access the file.
    """
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise InvalidArgumentError(
            f"{path} has mode {stat.S_IMODE(mode):04o}, so other users may read or change it; use chmod 0600 or 0640"
        )


class ServerCertificate(ReloadingFiles):
    """TLS credentials of a port, reloaded when their files change.

    At each handshake, a gRPC thread requests the certificate and key and receives the last valid pair. Open connections
    are not affected. If the files are invalid, the error is logged and the previous pair stays in use. This happens,
    for example, when only the certificate has been replaced so far.

    Args:
        cert: PEM file with the certificate and its chain.
        key: PEM file with the private key. The key must have no passphrase, and other users must not be able to read
            the file.
        client_ca: PEM file with the certificate authorities that may sign client certificates (mTLS), or None if
            clients need no certificate.

    Attributes:
        context: TLS context for connections that do not use gRPC. A new context replaces it when the files change.

    Raises:
        InvalidArgumentError: the files are unusable.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        super().__init__(cert, key, client_ca, what_stays="the previous certificate stays in use")
        self._delivered = self._current

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials that gRPC uses to open the port."""
        return grpc.dynamic_ssl_server_credentials(
            self._current,
            self._changed,  # type: ignore[arg-type]  # grpc documents that None means no change
            require_client_authentication=self._client_ca is not None,
        )

    def _read(self) -> None:
        try:
            check_private(self._key)
            contents = self._contents()
            # Check the pair with Python's ssl module, because gRPC would report a problem only at the first handshake.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._cert, self._key, password=_no_passphrase)
            if self._client_ca is not None:
                check_authorities("tls_client_ca", self._client_ca)
                context.load_verify_locations(self._client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
            if contents != self._contents():
                raise InvalidArgumentError("the certificate files were replaced while they were being read")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise InvalidArgumentError(f"could not load {self._cert} and {self._key} for TLS: {_why(error)}") from None
        key, cert, *client_ca = contents
        self._current = grpc.ssl_server_certificate_configuration([(key, cert)], *client_ca)
        self.context = context
        _log.info(LogMessage("loaded the certificate for new connections", path=self._cert))

    def _contents(self) -> list[bytes]:
        return [path.read_bytes() for path in (self._key, self._cert, self._client_ca) if path is not None]

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        # Only gRPC threads write `_delivered`, and only the event loop writes `_current`, so no write is lost.
        current = self._current
        if current is self._delivered:
            return None
        self._delivered = current
        return current


def check_authorities(setting: str, path: Path) -> None:
    """Reject an unusable certificate authority file.

    Raises:
        InvalidArgumentError: the file cannot be read or contains no certificates.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=path.read_bytes().decode("ascii"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgumentError(
            f"{setting} is {path}, which could not be loaded ({reason}); expected certificates in PEM format",
            field=setting,
        ) from None


def _no_passphrase() -> str:
    raise InvalidArgumentError("the key has a passphrase; use a key without a passphrase, readable only by this user")


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


class Token(BaseModel):
    """An entry in the tokens file, which contains the token's digest instead of the token itself.

    Use `make_token` to create a `Token`.

    Attributes:
        name: name of the token's holder, shown in logs.
        sha256: SHA-256 digest of the token.
        roles: roles granted to the holder.
        prefixes: name prefixes of the partitions for which the token is valid. "" matches all partitions.
        expires: expiry time, or None if the token does not expire.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="1 to 64 letters, digits, '.', '_' or '-'")
    sha256: str = Field(
        pattern="^[0-9a-f]{64}$",
        description="64 hexadecimal digits, as created by `tq-service token new`",
        repr=False,  # a user may have entered the token itself by mistake
    )
    roles: frozenset[Role] = Field(min_length=1, description=f"a list of one or more of {', '.join(ROLES)}")
    prefixes: tuple[str, ...] = Field(min_length=1, description="a list of one or more strings ('' for all partitions)")
    expires: AwareDatetime | None = Field(
        default=None, strict=True, description="a time with its time zone, such as 2027-01-31T00:00:00Z, without quotes"
    )

    @property
    def sorted_roles(self) -> list[Role]:
        """The token's roles in the order of `ROLES`."""
        return sorted(self.roles, key=ROLES.index)

    def is_expired(self) -> bool:
        """Return whether the token has expired according to this machine's clock."""
        return self.expires is not None and self.expires <= datetime.now(UTC)

    def covers(self, partition_id: str) -> bool:
        """Return whether the token grants access to a partition."""
        return partition_id.startswith(self.prefixes)


def new_secret() -> str:
    """Return a new random token."""
    return _MARK + secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(secret: str) -> str:
    """Return the digest that identifies a token in the tokens file."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def make_token(**entry: object) -> Token:
    """Create a token from the keys and values of a tokens file entry.

    Raises:
        InvalidArgumentError: a value is invalid or missing.
    """
    try:
        return Token.model_validate(entry)
    except ValidationError as error:
        name = str(error.errors()[-1]["loc"][0])  # pydantic lists errors about unknown keys last
    field = Token.model_fields.get(name)
    if field is None:
        raise InvalidArgumentError(f"unknown key {name!r:.80}; expected one of {', '.join(Token.model_fields)}")
    got = f"got {entry.get(name)!r:.80}; " if field.repr else ""
    raise InvalidArgumentError(f"{name}: {got}expected {field.description}")


def format_entry(token: Token) -> str:
    """Return a token's TOML entry for the tokens file."""
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
    """Parse the text of a tokens file and return the tokens by digest.

    Raises:
        InvalidArgumentError: the text is not TOML, an entry is invalid, or two entries have the same name or token.
    """
    try:
        document = tomllib.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"the text is not valid TOML: {error}") from None
    entries = document.pop("token", [])
    if document or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidArgumentError("the text has content other than [[token]] entries; remove it")
    tokens: dict[str, Token] = {}
    for number, entry in enumerate(entries, 1):
        try:
            token = make_token(**entry)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"entry {number} ({entry.get('name')!r:.80}): {error}") from None
        if token.sha256 in tokens or token.name in {each.name for each in tokens.values()}:
            raise InvalidArgumentError(
                f"entry {number} repeats the name {token.name!r} or the token of an earlier entry"
            )
        tokens[token.sha256] = token
    return tokens


def read_tokens(path: Path) -> dict[str, Token]:
    """Read a tokens file and return the tokens by digest.

    Raises:
        InvalidArgumentError: the file could not be read, other users can access it, or its content is invalid.
    """
    try:
        check_private(path)
        return parse_tokens(path.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"could not read the tokens file {path}: {error.strerror}") from None
    except ValueError as error:  # InvalidArgumentError, or bytes that are not text
        raise InvalidArgumentError(f"the tokens file {path} is invalid: {error}") from None


def append_token(path: Path, token: Token) -> None:
    """Add a token to a tokens file. The file is created if it does not exist.

    The file is replaced atomically. Concurrent calls wait for one another, even across processes.

    Raises:
        InvalidArgumentError: the file is invalid or already contains a token with this name.
        OSError: the file could not be written.
    """
    with _locked(path):
        text = ""
        if path.exists():
            read_tokens(path)
            text = path.read_text()
        _replace(path, f"{text.rstrip()}\n\n{format_entry(token)}".lstrip())


def remove_token(path: Path, name: str) -> None:
    """Remove a token from a tokens file, keeping other entries and comments.

    Raises:
        InvalidArgumentError: the file is invalid, could not be read, or contains no token with this name.
        OSError: the file could not be written.
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
            f"the entry for {name!r} in {path} is not a separate [[token]] table; edit the file to remove the entry"
        )


def _replace(path: Path, text: str) -> None:
    """Atomically replace a tokens file."""
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
    """Hold a lock on a file's directory during the `with` block.

    A lock on the file itself would be lost when the file is replaced.
    """
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class TokenFile(ReloadingFiles):
    """A tokens file and its current tokens. If a changed file is invalid, the previous tokens stay valid.

    Args:
        path: path of the tokens file.

    Attributes:
        tokens: current tokens, by digest. Loading the file creates a new mapping instead of changing this one.

    Raises:
        InvalidArgumentError: the file could not be read, other users can access it, or its content is invalid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tokens: Mapping[str, Token] = {}
        super().__init__(path, what_stays="the previous tokens stay valid")

    def _read(self) -> None:
        self.tokens = read_tokens(self._path)
        _log.info(LogMessage("loaded tokens", count=len(self.tokens), path=self._path))


def _quote(text: str) -> str:
    """Return a string literal that is valid in both TOML and JSON."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class InternalSecret(ReloadingFiles):
    """The internal secret and its file. If a changed file is invalid, the previous secret stays in use.

    Use each instance from a single event loop.

    Args:
        path: path of the secret file.
        is_made: whether to create the file if it is missing, and to recreate it if it is removed. If several services
            start at the same time, one of them creates the file and all of them read it.
        is_own: whether the file and its directory must be accessible only to this user. Set `is_own` if other users can
            create files next to the directory, as in /tmp. If false, the only requirement is that other users cannot
            read the file.
        clock: monotonic clock that returns seconds.

    Raises:
        InvalidArgumentError: the file is unusable.
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
        """Proof of the internal secret, to send with calls to other services."""
        is_new = bool(self._old_proof) and self._clock() - self._renewed_at < _SEND_OLD_SECONDS
        return self._old_proof if is_new else self._proof

    def accepts(self, proof: str) -> bool:
        """Return whether a proof is valid. For a minute after the secret changes, its old proof remains valid."""
        given = proof.encode("utf-8", "replace")
        is_present = hmac.compare_digest(given, self._proof.encode())
        is_old = bool(self._old_proof) and self._clock() - self._renewed_at < _ACCEPT_OLD_SECONDS
        return is_present | (is_old & hmac.compare_digest(given, self._old_proof.encode()))

    def derive(self, purpose: str) -> bytes:
        """Derive 32 bytes from the secret for the given purpose.

        The result reveals neither the secret nor the bytes derived for other purposes.
        """
        return hmac.new(self._secret, purpose.encode(), hashlib.sha256).digest()

    def reload(self) -> None:
        """Reload the file if it has changed and is no longer being written."""
        # A cleaner of temporary files may have removed the file, but other services may still need to read it.
        if self._is_made and file_signature(self._path) is None:
            try:
                self._publish(self._secret + b"\n")
            except InvalidArgumentError as error:
                _log.debug(LogMessage("could not recreate the internal secret", path=self._path, error=error))
        super().reload()

    def _read(self) -> None:
        try:
            secret = self._checked()
        except OSError as error:
            advice = "" if self._is_made else "; copy the controller's secret to this path"
            raise InvalidArgumentError(
                f"could not read the internal secret {self._path}: {error.strerror}{advice}",
                field="internal_secret_file",
            ) from None
        if secret == self._secret:
            return
        if self._secret:
            self._old_proof, self._renewed_at = self._proof, self._clock()
            _log.info(LogMessage("loaded a new internal secret", path=self._path))
        self._secret = secret
        self._proof = self.derive(_CALLS).hex()

    def _checked(self) -> bytes:
        """Read and validate the secret.

        Raises:
            OSError: the file could not be read.
            InvalidArgumentError: other users may access the file, or its content is not a valid secret.
        """
        if self._is_own:
            self._check_directory()
        else:
            check_private(self._path)
        # O_NONBLOCK prevents `open` from blocking if the path is a named pipe.
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
                f"the internal secret {self._path} has {len(secret)} characters; expected {SHORTEST_SECRET} to "
                f"{_LONGEST_SECRET}. Create the secret with `openssl rand -hex 32`",
                field="internal_secret_file",
            )
        return secret

    def _check_directory(self) -> None:
        directory = self._path.parent
        _check_own(directory, directory.stat(follow_symlinks=False), stat.S_ISDIR)

    def _publish(self, content: bytes) -> None:
        """Create the file atomically, readable only by this user. If the file exists, leave it unchanged."""
        try:
            if self._is_own:
                self._path.parent.mkdir(mode=0o700, exist_ok=True)
                self._check_directory()
            with NamedTemporaryFile(dir=self._path.parent, prefix=f".{self._path.name}.") as file:  # has mode 0600
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.link(file.name, self._path)
        except FileExistsError:
            return  # another service has created the file
        except OSError as error:
            raise InvalidArgumentError(
                f"the internal secret {self._path} does not exist and could not be created ({error.strerror}). Set "
                "internal_secret_file to a file that all services of this deployment share",
                field="internal_secret_file",
            ) from None
        _log.info(LogMessage("created the internal secret shared by the services of this deployment", path=self._path))


class ServiceCredentials(Credentials):
    """Credentials for calls between services: the token, the certificate, and the proof of the internal secret.

    Attributes:
        secret: the internal secret, or None if the service has none.
    """

    secret: InternalSecret | None = None

    @property
    def sent_secret(self) -> str:
        """Name of the secret that a plaintext connection would expose, or "" if no secret is sent."""
        return super().sent_secret or ("the proof of the internal secret" if self.secret is not None else "")

    def metadata(self) -> Metadata | None:
        """Return call metadata with the token and the proof of the internal secret.

        Raises:
            UnauthenticatedError: the token file is unusable.
        """
        metadata = super().metadata()
        return metadata if self.secret is None else (*(metadata or ()), (INTERNAL_KEY, self.secret.proof))


def find_secret(settings: ServeSettings, *, has_tokens: bool) -> InternalSecret | None:
    """Return the internal secret of a service, or None if the service does not need one.

    Args:
        settings: configuration of the service.
        has_tokens: whether the service requires tokens and has its own token. If so, services can identify each other
            by their tokens.

    Raises:
        InvalidArgumentError: the service needs a secret, but the secret is missing or unusable.
    """
    if settings.internal_secret_file is not None:
        return InternalSecret(settings.internal_secret_file, is_made=settings.role != "storage")
    if has_tokens:
        return None
    targets = (settings.advertise, settings.controller)
    # The service listens on, advertises, and connects to only loopback addresses.
    if is_loopback(settings.host) and all(target is None or is_loopback_target(target) for target in targets):
        try:
            return InternalSecret(own_secret_path(), is_made=True, is_own=True)
        except InvalidArgumentError as error:
            if settings.role != "all":
                raise
            _log.warning(
                LogMessage("this service has no internal secret, so other storage services cannot join it", error=error)
            )
            return None
    if settings.role == "all":
        return None
    raise InvalidArgumentError(
        f"a service with the role {settings.role} must distinguish calls by other services from calls by clients. Set "
        "the same internal_secret_file (--internal-secret-file, TQ_INTERNAL_SECRET_FILE; create it with "
        "`openssl rand -hex 32`) for all services. Alternatively, set auth_tokens_file and peer_token_file for all "
        "services, using tokens with the service role (docs/security.md)",
        field="internal_secret_file",
    )


def own_secret_path() -> Path:
    """Return the default path of the internal secret, shared by this user's services on this machine."""
    directory = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108  (owner and mode are checked)
    return Path(directory) / f"tq_service-internal-{os.geteuid()}" / "secret"


def _check_own(path: Path, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if is_kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return
    raise InvalidArgumentError(
        f"{path} is not private to this user (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}), so "
        "other users could impersonate a service. Remove it, or set internal_secret_file to a file that the services "
        "share",
        field="internal_secret_file",
    )
