"""The settings of an engine, from its URL: each is read by name, and unknown ones are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from tq_service.addresses import redacted
from tq_service.errors import InvalidArgumentError

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


class EngineUrl:
    """A URL such as `s3://bucket/prefix?region=us-east-1`.

    It may contain a password, so messages show `redacted` instead of it.

    Attributes:
        scheme: name of the engine.
        host: the part between `//` and the next `/`, without user and password.
        path: the part after it, without the first `/`.
        username, password: of the URL, or None.
    """

    def __init__(self, url: str) -> None:
        """Read a URL.

        Raises:
            InvalidArgumentError: it is not a URL, or names a setting twice.
        """
        parts = urlsplit(url)
        if not parts.scheme or "://" not in url:
            raise InvalidArgumentError(
                f"got an object store {redacted(url)!r}, expected a URL such as s3://bucket/prefix"
            )
        self.scheme = parts.scheme
        self.host = parts.netloc.rpartition("@")[2]
        self.path = unquote(parts.path.removeprefix("/"))
        self.username = None if parts.username is None else unquote(parts.username)
        self.password = None if parts.password is None else unquote(parts.password)
        self.redacted = redacted(url)
        self._options: dict[str, str] = {}
        for name, values in parse_qs(parts.query, keep_blank_values=True).items():
            if len(values) != 1:
                raise InvalidArgumentError(f"{self.redacted}: {name} is given {len(values)} times, expected once")
            self._options[name] = values[0]
        self._asked: set[str] = set()

    @property
    def location(self) -> str:
        """Host and path together."""
        return f"{self.host}/{self.path}" if self.path else self.host

    def text(self, name: str, default: str) -> str:
        """Return a setting as it stands in the URL."""
        self._asked.add(name)
        return self._options.get(name, default)

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """Return a setting that is one of some words."""
        value = self.text(name, default)
        if value not in choices:
            raise self._wrong(name, value, f"one of {', '.join(choices)}")
        return value

    def count(self, name: str, default: int, *, least: int = 1) -> int:
        """Return a setting that is a whole number."""
        value = self.text(name, str(default))
        if not value.isascii() or not value.isdigit() or int(value) < least:
            raise self._wrong(name, value, f"a whole number of at least {least}")
        return int(value)

    def seconds(self, name: str, default: float) -> float:
        """Return a setting that is a time in seconds, more than 0."""
        value = self.text(name, str(default))
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < float("inf"):
            raise self._wrong(name, value, "seconds, more than 0")
        return seconds

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a setting that is true or false."""
        value = self.text(name, str(default)).lower()
        if value not in _TRUE | _FALSE:
            raise self._wrong(name, value, "true or false")
        return value in _TRUE

    def secret(self, name: str, variable: str) -> str | None:
        """Return a secret: of the file that the setting `<name>_file` names, else of an environment variable.

        Raises:
            InvalidArgumentError: the file cannot be read.
        """
        found = self.file(f"{name}_file")
        return os.environ.get(variable) if found is None else found.decode().strip()

    def file(self, name: str) -> bytes | None:
        """Return the content of the file that a setting names, or None if it names none.

        Raises:
            InvalidArgumentError: the file cannot be read.
        """
        path = self.text(name, "")
        try:
            return Path(path).read_bytes() if path else None
        except OSError as error:
            raise InvalidArgumentError(
                f"{self.redacted}: {name} {path} cannot be read ({type(error).__name__}); expected a file"
            ) from error

    def check_all_used(self) -> None:
        """Refuse settings that no engine has read.

        Raises:
            InvalidArgumentError: it has some.
        """
        unknown = sorted(self._options.keys() - self._asked)
        if unknown:
            raise InvalidArgumentError(
                f"{self.redacted}: got the settings {', '.join(unknown)}, which {self.scheme} does not know; known: "
                f"{', '.join(sorted(self._asked)) or 'none'}"
            )

    def _wrong(self, name: str, value: str, expected: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self.redacted}: {name} is {value!r}, expected {expected}", field=name)
