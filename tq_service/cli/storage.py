"""`tq-service storage`: the storage services that a controller knows."""

from __future__ import annotations

from typing import Any

from rich.filesize import decimal

from tq_service.cli.addresses import open_client
from tq_service.cli.options import make_group, verb
from tq_service.cli.output import AsJson, print_json, print_table

EXAMPLES = """\
  tq-service storage ls
  tq-service storage ls --json"""

group = make_group("List the storage services.", EXAMPLES)


@group.callback()
def _group() -> None:
    """Have verbs, also where there is one only."""


@verb(group, "ls")
def ls(as_json: AsJson = False, **service: Any) -> None:
    """List the storage services with what they hold, and since when nothing was heard of them."""
    with open_client(**service) as client:
        storages = client.status(explain=False).storages
        own = client.address
    if as_json:
        print_json(storages)
        return
    rows = [
        (
            each.storage_id,
            each.address or own,
            decimal(each.used_bytes),
            "none" if each.max_bytes is None else decimal(each.max_bytes),
            each.put_count,
            "here" if each.heard_ago_seconds is None else f"{each.heard_ago_seconds:.0f} s ago",
            "silent" if each.is_silent else "takes puts",
        )
        for each in storages
    ]
    print_table("storage, address, >used, >quota, >puts, >heard, state", rows)
