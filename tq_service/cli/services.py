"""The commands `tq-service storage`, `tq-service sampler` and `tq-service checkpoint`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from tq_service.cli.options import Answer, Prefix, make_group, table, verb

if TYPE_CHECKING:
    from tq_service.client import Client
    from tq_service.results import CheckpointSummary, ServiceStatus, StorageStatus

STORAGE = make_group("""\
  tq-service storage ls
  tq-service storage ls --json""")
SAMPLER = make_group("""\
  tq-service sampler ls
  tq-service sampler ls --address controller:50051 --json""")
CHECKPOINT = make_group("""\
  tq-service checkpoint write nightly
  tq-service checkpoint write nightly/2026-11-21 --metadata '{"step": 12}' --address controller:50051
  tq-service checkpoint ls nightly/
  tq-service checkpoint restore nightly --replace""")

_COPY_SECONDS = 3600.0


# Storage services


@verb(STORAGE, "ls")
def list_storages(client: Client) -> Answer:
    """List storage services with their used bytes, quotas, last heartbeats and mirror states."""
    status = client.status(explain=False)
    yield status.storages
    yield table(
        "storage, address, >used, >quota, >puts, >heard, state",
        [
            (
                each.storage_id,
                each.address or client.address,
                None if each.is_adopted else decimal(each.used_bytes),
                _quota(each),
                each.put_count,
                "here" if each.heard_ago_seconds is None else f"{each.heard_ago_seconds:.0f} s ago",
                _state(status, each),
            )
            for each in status.storages
        ],
    )
    mirrors = [(each.storage_id, each.mirror) for each in status.storages if each.mirror is not None]
    if mirrors:
        is_spilling = any(mirror.spilled_bytes for _, mirror in mirrors)
        yield ""
        yield table(
            "storage, mirror, answers, >unmirrored, >few copies, >unfetched" + ", >spilled" * is_spilling,
            [
                (
                    name,
                    mirror.url,
                    None if mirror.is_reachable is None else "yes" if mirror.is_reachable else "no",
                    decimal(mirror.unmirrored_bytes),
                    mirror.short_put_count,
                    mirror.unfetched_put_count,
                    *([decimal(mirror.spilled_bytes)] if is_spilling else ()),
                )
                for name, mirror in mirrors
            ],
        )


def _quota(storage: StorageStatus) -> str | None:
    if storage.is_adopted:  # `max_bytes` is the successor's quota, shown in the successor's row
        return None
    return "none" if storage.max_bytes is None else decimal(storage.max_bytes)


def _state(status: ServiceStatus, storage: StorageStatus) -> str:
    if storage.is_silent:
        return "silent"
    if storage.is_adopted:
        return f"taken over by {status.successor_of(storage) or 'another service'}"
    return "takes puts"


# Samplers


@verb(SAMPLER, "ls")
def list_samplers(client: Client) -> Answer:
    """List the available samplers and their options."""
    samplers = client.list_samplers()
    yield samplers
    rows = []
    for sampler in samplers:
        rows.append((sampler.name, "", "", "", sampler.summary))
        for option in sampler.options:
            default = "required" if option.default_json is None else option.default_json
            rows.append(("", option.name, option.type, default, option.summary))
    yield table("sampler, option, takes, default, meaning", rows)


# Checkpoints

_Name = Annotated[str, typer.Argument(help="Checkpoint name: a path relative to the controller's checkpoint_dir.")]


@verb(CHECKPOINT, "write", timeout=_COPY_SECONDS)
def write(
    client: Client,
    name: _Name,
    metadata: Annotated[
        str, typer.Option(help="JSON object to store with the checkpoint, such as '{\"step\": 12}'.")
    ] = "{}",
) -> Answer:
    """Write a consistent copy of all data to the controller's disk while the service keeps running.

    An existing checkpoint with the same name is replaced only after the new checkpoint has been written.
    """
    copy = client.checkpoint(name, metadata=_object(metadata), timeout=client.timeout)
    yield copy
    yield (
        f"wrote {copy.sample_count} samples of {copy.partition_count} partitions, {copy.value_bytes} bytes, to "
        f"checkpoint {copy.name}; the service paused for at most {copy.pause_seconds * 1e3:.1f} ms"
    )


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"the value is not valid JSON: {error}", param_hint="--metadata") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("expected a JSON object such as '{\"step\": 12}'", param_hint="--metadata")
    return value


@verb(CHECKPOINT, "ls")
def list_checkpoints(client: Client, prefix: Prefix = "") -> Answer:
    """List the checkpoints under the controller's checkpoint_dir, with their metadata."""
    found = client.list_checkpoints(prefix)
    yield found
    yield table("checkpoint, written at (UTC), >partitions, >samples, >size, metadata", map(_row, found))


def _row(one: CheckpointSummary) -> tuple[object, ...]:
    if one.problem:
        return one.name, None, None, None, decimal(one.file_bytes), f"cannot be read: {one.problem}"
    written_at = datetime.fromtimestamp(one.written_at, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    metadata = json.dumps(one.metadata, ensure_ascii=False) if one.metadata else None
    return one.name, written_at, one.partition_count, one.sample_count, decimal(one.file_bytes), metadata


@verb(CHECKPOINT, "restore", timeout=_COPY_SECONDS)
def restore(
    client: Client,
    name: _Name,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace all existing partitions with those of the checkpoint.")
    ] = False,
) -> Answer:
    """Restore a checkpoint into a service that has no partitions. With --replace, replace all existing partitions.

    The service first verifies the entire checkpoint, then restores it atomically.
    """
    restored = client.restore(name, replace=replace, timeout=client.timeout)
    yield restored
    yield (
        f"restored {restored.sample_count} samples of {restored.partition_count} partitions, {restored.value_bytes} "
        "bytes"
    )
