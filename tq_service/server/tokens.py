"""Bearer tokens: made once, kept as digests in a file, and read again when the file changes.

A token is 256 random bits, so SHA-256 keeps it: they are too many to try for a slow hash to matter, while a slow hash
would let any client keep the service busy with wrong tokens. Tokens are found by their digest, whose place in a table
reveals nothing about those that are stored: a caller cannot steer the digest of its token, so there is nothing to learn
from the time that a look-up takes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from tq_service.errors import InvalidArgumentError, nearest
from tq_service.log_message import LogMessage
from tq_service.server.reloading_files import ReloadingFiles, check_private
from tq_service.wire.credentials import ROLES, Role

_log = logging.getLogger(__name__)
ALL_PARTITIONS: Final = ""

_MARK: Final = "tq_"  # so that programs that look for leaked secrets can find one
_RANDOM_BYTES: Final = 32


class Token(BaseModel):
    """What is known of a token, all but the token itself: its entry in the file; `make_token` makes one.

    Attributes:
        name: whose it is, for logs.
        sha256: its digest.
        roles: what its holder may do.
        prefixes: beginnings of the names of the partitions that he may do it with; "" is all.
        expires: until when it is valid; None: for ever.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="1 to 64 letters, digits, '.', '_', '-'")
    sha256: str = Field(
        pattern="^[0-9a-f]{64}$",
        description="64 hexadecimal digits, as `tq-service token new` makes them",
        repr=False,  # where the two were confused, the token itself is there
    )
    roles: frozenset[Role] = Field(min_length=1, description=f"a list of at least one of {', '.join(ROLES)}")
    prefixes: tuple[str, ...] = Field(min_length=1, description="a list of at least one text ('' is all partitions)")
    expires: AwareDatetime | None = Field(
        default=None, strict=True, description="a time with its zone as 2027-01-31T00:00:00Z, without quotes"
    )

    @property
    def sorted_roles(self) -> list[Role]:
        """Its roles in their usual order."""
        return sorted(self.roles, key=ROLES.index)

    def is_expired(self) -> bool:
        """Whether its time is over, on the clock of this machine."""
        return self.expires is not None and self.expires <= datetime.now(UTC)

    def covers(self, partition_id: str) -> bool:
        """Whether a partition is among those that it is for."""
        return partition_id.startswith(self.prefixes)


def new_secret() -> str:
    """Return a new token, as its holder sends it."""
    return _MARK + secrets.token_urlsafe(_RANDOM_BYTES)


def digest_of(secret: str) -> str:
    """Return what is kept of a token."""
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
    """Return a token's entry for the file, in TOML."""
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
        InvalidArgumentError: it is not TOML, or an entry is wrong, or two are of one name or token.
    """
    try:
        document = tomllib.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"not TOML: {error}") from None
    entries = document.pop("token", [])
    if document or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidArgumentError("expected [[token]] entries and nothing else")
    tokens: dict[str, Token] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries, 1):
        try:
            token = make_token(**entry)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"entry {number} ({entry.get('name')!r:.80}): {error}") from None
        if token.name in names or token.sha256 in tokens:
            raise InvalidArgumentError(f"entry {number}: the name {token.name!r} or its token is there twice")
        names.add(token.name)
        tokens[token.sha256] = token
    return tokens


def read_tokens(path: Path) -> dict[str, Token]:
    """Return the tokens of a file by their digests.

    Raises:
        InvalidArgumentError: it cannot be read, is open to others, or is wrong.
    """
    try:
        check_private(path)
        return parse_tokens(path.read_text())
    except OSError as error:
        raise InvalidArgumentError(f"the tokens file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # InvalidArgumentError, or bytes that are no text
        raise InvalidArgumentError(f"the tokens file {path}: {error}") from None


def append_token(path: Path, token: Token) -> None:
    """Add a token to a file, which is made where it is not there; readers see the old file or the new one, whole.

    Another call that adds one at the same time, in this process or another, waits.

    Raises:
        InvalidArgumentError: the file is wrong, or has a token of that name.
        OSError: it cannot be written.
    """
    with _locked(path):
        text = ""
        if path.exists():
            read_tokens(path)
            text = path.read_text()
        _replace(path, f"{text.rstrip()}\n\n{format_entry(token)}".lstrip())


def remove_token(path: Path, name: str) -> None:
    """Remove a token from a file; the other entries and their comments stay as they are.

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
            f"the tokens file {path}: the entry of {name!r} is not of its own; remove it by hand"
        )


def _replace(path: Path, text: str) -> None:
    """Write a file of tokens in place of the one that is there."""
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
    """Hold the lock of a file that is replaced, and so cannot carry it: that of its directory."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class TokenFile(ReloadingFiles):
    """The tokens of a file as it is now. A broken new file is logged, and the tokens read before stay.

    Args:
        path: the file.

    Attributes:
        tokens: by their digests; another mapping each time the file was read.

    Raises:
        InvalidArgumentError: it cannot be read, is open to others, or is wrong.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tokens: Mapping[str, Token] = {}
        super().__init__(path, what_stays="the tokens read before stay valid")

    def _read(self) -> None:
        self.tokens = read_tokens(self._path)
        _log.info(LogMessage("read tokens", count=len(self.tokens), path=self._path))


def _quote(text: str) -> str:
    """Return a text as TOML and JSON both write it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
