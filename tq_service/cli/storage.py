"""`tq-service storage`: the storage services that a controller knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.filesize import decimal

from tq_service.cli.addresses import open_client
from tq_service.cli.options import make_group, verb
from tq_service.cli.output import AsJson, print_json, print_table

if TYPE_CHECKING:
    from tq_service.results import ServiceStatus, StorageStatus

EXAMPLES = """\
  tq-service storage ls
  tq-service storage ls --json"""

group = make_group("List the storage services.", EXAMPLES)


@group.callback()
def _group() -> None:
    """Have verbs, also where there is one only."""


@verb(group, "ls")
def ls(as_json: AsJson = False, **service: Any) -> None:
    """List the storage services: what they hold, since when nothing was heard of them, and how their mirrors are."""
    with open_client(**service) as client:
        status = client.status(explain=False)
        own = client.address
    if as_json:
        print_json(status.storages)
        return
    rows = [
        (
            each.storage_id,
            each.address or own,
            None if each.is_adopted else decimal(each.used_bytes),
            _quota(each),
            each.put_count,
            "here" if each.heard_ago_seconds is None else f"{each.heard_ago_seconds:.0f} s ago",
            _state(status, each),
        )
        for each in status.storages
    ]
    print_table("storage, address, >used, >quota, >puts, >heard, state", rows)
    is_spilling = any(each.mirror is not None and each.mirror.spilled_bytes for each in status.storages)
    mirrors: list[tuple[object, ...]] = [
        (
            each.storage_id,
            mirror.url,
            None if mirror.is_reachable is None else "yes" if mirror.is_reachable else "no",
            decimal(mirror.unmirrored_bytes),
            mirror.short_put_count,
            mirror.unfetched_put_count,
            decimal(mirror.spilled_bytes),
        )[: None if is_spilling else -1]
        for each in status.storages
        if (mirror := each.mirror) is not None
    ]
    if mirrors:
        typer.echo()
        columns = "storage, mirror, answers, >unmirrored, >few copies, >unfetched"
        print_table(columns + ", >spilled" * is_spilling, mirrors)


def _quota(storage: StorageStatus) -> str | None:
    if storage.is_adopted:  # what it says is the quota of its heir, which has a row of its own
        return None
    return "none" if storage.max_bytes is None else decimal(storage.max_bytes)


def _state(status: ServiceStatus, storage: StorageStatus) -> str:
    if storage.is_silent:
        return "silent"
    if storage.is_adopted:
        return f"taken over by {status.heir_of(storage) or 'another one'}"
    return "takes puts"
