"""A service that a run has started for itself: it ends with the process that started it, however that ends."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tq_service.testing import ServiceProcess

_TOKEN_NAME: Final = "run"  # noqa: S105  (a name)


class OwnedService:
    """A service as a process of its own, for the processes of one run.

    On a host that others reach it asks for a token, which only the run knows; what travels is not encrypted, as little
    as between the processes of a Ray cluster.

    Args:
        host: where it listens; None: on this machine's loopback address, for its users, without a token.
        settings: of `tq-service serve`, by name.

    Attributes:
        address: where it listens, "host:port".
        token: for its clients; None: they need none.
    """

    def __init__(self, host: str | None, settings: dict[str, Any]) -> None:
        self._directory = TemporaryDirectory(prefix="tq_service-run-")
        self.token: str | None = None
        flags = [part for name, value in ({"grace_seconds": 1} | settings).items() for part in _flag(name, value)]
        if host is not None:
            self.token, tokens = _new_token(Path(self._directory.name) / "tokens.toml")
            flags += ["--host", host, "--insecure", "--auth-tokens-file", str(tokens)]
        self._process = ServiceProcess(*flags, start_new_session=True)
        try:
            self._process.start()
        except BaseException:
            self._directory.cleanup()
            raise
        self.address = self._process.address

    def stop(self) -> None:
        """End it."""
        self._process.stop()
        self._directory.cleanup()


def _flag(name: str, value: Any) -> list[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [] if value is None else [f"--{option}", str(value)]


def _new_token(path: Path) -> tuple[str, Path]:
    from tq_service.server.credential_files import append_token, digest_of, make_token, new_secret  # noqa: PLC0415

    secret = new_secret()
    append_token(path, make_token(name=_TOKEN_NAME, sha256=digest_of(secret), roles=["admin"], prefixes=[""]))
    return secret, path
