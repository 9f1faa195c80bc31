"""`tq-service token`: creates, lists and revokes bearer tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from tq_service.cli.options import Answer, make_group, table, verb
from tq_service.errors import AlreadyExistsError, InvalidArgumentError

TOKEN = make_group("""\
  tq-service token new --name rollouts --role produce --prefix train@ --file tokens.toml > rollouts.token
  tq-service token new --name trainer --role consume --expires 90d --file tokens.toml --output trainer.token
  tq-service token ls --file tokens.toml
  tq-service token revoke trainer --file tokens.toml""")
_SPAN = re.compile(r"(\d+)([hd])")

File = Annotated[
    Path | None,
    typer.Option(envvar="TQ_AUTH_TOKENS_FILE", help="Path of the service's token file (TOML).", show_default=False),
]


@verb(TOKEN, "new", timeout=None)
def new(
    *,
    name: Annotated[str, typer.Option(help="Name of the token, used in logs and to revoke the token.")],
    role: Annotated[
        list[str], typer.Option(help="Role of the token: read, produce, consume, admin or service; may be repeated.")
    ],
    prefix: Annotated[
        list[str] | None,
        typer.Option(help="Allow only partitions whose names begin with this prefix; may be repeated. Default: all."),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(help="Expiry time or validity period: 2027-01-31, 2027-01-31T12:00Z, 12h or 90d. Default: none."),
    ] = None,
    file: File = None,
    output: Annotated[
        Path | None,
        typer.Option(help="New file to write the token to, readable only by you. Default: stdout."),
    ] = None,
) -> Answer:
    """Create a token and print it; the token cannot be shown again.

    The entry in the tokens file contains only a digest of the token. The command adds the entry to --file, or prints
    the entry if --file is not set. A running service reads the new entry within a second.
    """
    from tq_service.server.credential_files import append_token, digest_of, format_entry, make_token, new_secret  # noqa: PLC0415

    secret = new_secret()
    token = make_token(
        name=name,
        sha256=digest_of(secret),
        roles=role,
        prefixes=prefix or [""],
        expires=None if expires is None else _moment(expires),
    )
    if output is not None:
        with _writes("output", output):
            _write_private(output, secret)
    try:
        if file is not None:
            with _writes("file", file):
                append_token(file, token)
    except BaseException:
        if output is not None:
            output.unlink()
        raise
    yield {"name": name, "token": secret if output is None else None, "file": None if file is None else str(file)}
    if output is None:
        yield secret
    typer.echo(f"added to {file}: {name}" if file is not None else f"\n{format_entry(token)}".rstrip(), err=True)


@verb(TOKEN, "revoke", timeout=None)
def revoke(name: Annotated[str, typer.Argument(help="Name of the token.")], file: File = None) -> Answer:
    """Remove a token from the token file; a running service rejects the token within a second."""
    from tq_service.server.credential_files import remove_token  # noqa: PLC0415  (not needed by --help)

    path = _given_file(file)
    with _writes("file", path):
        remove_token(path, name)
    yield {"name": name, "file": str(path)}
    yield f"removed from {path}: {name}"


@verb(TOKEN, "ls", timeout=None)
def list_tokens(file: File = None) -> Answer:
    """List the tokens in the token file: names, roles, prefixes and expiry times."""
    from tq_service.server.credential_files import read_tokens  # noqa: PLC0415  (not needed by --help)

    shown: list[dict[str, Any]] = [
        {
            "name": token.name,
            "roles": token.sorted_roles,
            "prefixes": token.prefixes,
            "expires": None if token.expires is None else token.expires.isoformat(),
            "is_expired": token.is_expired(),
        }
        for token in read_tokens(_given_file(file)).values()
    ]
    yield shown
    rows = [
        (
            token["name"],
            ", ".join(token["roles"]),
            ", ".join(prefix or "(all)" for prefix in token["prefixes"]),
            f"{token['expires'] or ''}{' (expired)' if token['is_expired'] else ''}",
        )
        for token in shown
    ]
    yield table("token, roles, prefixes, expires", rows)


def _given_file(file: Path | None) -> Path:
    if file is None:
        raise InvalidArgumentError("no token file specified; set --file or TQ_AUTH_TOKENS_FILE", field="file")
    return file


def _moment(text: str) -> datetime:
    """Parse the value of --expires. A time without a time zone is interpreted as UTC."""
    span = _SPAN.fullmatch(text)
    try:
        if span is not None:
            return datetime.now(UTC) + timedelta(hours=int(span[1]) * (24 if span[2] == "d" else 1))
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidArgumentError(
            f"--expires: got {text!r}, expected a time such as 2027-01-31 or 2027-01-31T12:00Z, or a period such as "
            "12h or 90d",
            field="expires",
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


@contextmanager
def _writes(option: str, path: Path) -> Iterator[None]:
    """Convert an OSError in the `with` block to an InvalidArgumentError that names the option and the path."""
    try:
        yield
    except OSError as error:
        raise InvalidArgumentError(f"--{option}: could not write {path}: {error.strerror}", field=option) from None


def _write_private(path: Path, secret: str) -> None:
    try:
        path.touch(0o600, exist_ok=False)
    except FileExistsError:
        raise AlreadyExistsError(
            f"--output: {path} already exists; specify a new file",
            metadata={"resource_type": "file", "resource_name": str(path)},
        ) from None
    path.write_text(f"{secret}\n")
