"""TransferQueue's checkpoint calls, and its key-value calls in both synchronous and `async_...` versions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Any, Final

from transfer_queue.client import TransferQueueClient
from transfer_queue.controller import OWN_CHECKPOINT_DIR, setting
from transfer_queue.session import close, current, get_client, init  # noqa: F401  (TransferQueue exports them here)

METADATA_FILE: Final = "metadata.json"
_LONGEST_NAME: Final = 200


def _of_client(name: str) -> Callable[..., Any]:
    """Return a function that calls `name` on this process's client. The caller must await `async_...` functions."""
    method = getattr(TransferQueueClient, name)

    @wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return getattr(current().client, name)(*arguments, **keywords)

    parameters = list(signature(method).parameters.values())
    call.__dict__["__signature__"] = Signature(parameters[1:])  # without the client parameter
    return call


kv_put, async_kv_put = _of_client("kv_put"), _of_client("async_kv_put")
kv_batch_put, async_kv_batch_put = _of_client("kv_batch_put"), _of_client("async_kv_batch_put")
kv_batch_get, async_kv_batch_get = _of_client("kv_batch_get"), _of_client("async_kv_batch_get")
kv_batch_get_by_meta, async_kv_batch_get_by_meta = (
    _of_client("kv_batch_get_by_meta"),
    _of_client("async_kv_batch_get_by_meta"),
)
kv_list, async_kv_list = _of_client("kv_list"), _of_client("async_kv_list")
kv_clear, async_kv_clear = _of_client("kv_clear"), _of_client("async_kv_clear")


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Write a checkpoint of the run's partitions. An existing checkpoint in the directory is replaced.

    The service always writes checkpoints below its own checkpoint directory. If `checkpoint_dir` is below
    `controller.checkpoint_dir`, the checkpoint is written to `checkpoint_dir` itself. Otherwise, the name
    of the checkpoint is derived from the path of `checkpoint_dir`. A file in `checkpoint_dir` records the name of the
    checkpoint.

    Args:
        checkpoint_dir: directory of the checkpoint, which is created if necessary.
        include_storage: ignored, because the data is always included.
        metadata: values to store as "user_metadata" in `metadata.json`.

    Raises:
        RuntimeError: this process has not joined a run.
        PreconditionError: the service has no checkpoint directory.
    """
    session = current()
    directory = Path(checkpoint_dir).absolute()
    top = setting(session.run.conf, "controller", "checkpoint_dir")
    name = _checkpoint_name(directory, OWN_CHECKPOINT_DIR if session.run.is_service_owned else top)
    session.client.sync_client.checkpoint(name, metadata=metadata or {})
    directory.mkdir(parents=True, exist_ok=True)
    content = {"storage_saved": True, "user_metadata": metadata or {}, "checkpoint": name}
    unfinished = directory / f".{METADATA_FILE}"
    unfinished.write_text(json.dumps(content, indent=2))
    unfinished.replace(directory / METADATA_FILE)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Replace the run's partitions with those in a checkpoint.

    Raises:
        FileNotFoundError: the directory does not contain a checkpoint.
        RuntimeError: this process has not joined a run.
    """
    session = current()
    content = json.loads((Path(checkpoint_dir) / METADATA_FILE).read_text())
    session.client.sync_client.restore(content["checkpoint"], replace=True)


def get_metrics_endpoint() -> str | None:
    """Return the run's `metrics.endpoint` as "host:port", or None if the endpoint is not set or no run exists."""
    try:
        conf = current().run.conf
    except RuntimeError:
        return None
    endpoint: str | None = setting(conf, "metrics", "endpoint")
    return endpoint


def _checkpoint_name(directory: Path, top: str | None) -> str:
    """Return the checkpoint name for a directory, relative to the service's checkpoint directory if possible."""
    if top is not None and directory.is_relative_to(Path(top).absolute()):
        return str(directory.relative_to(Path(top).absolute()))
    name = "/".join(re.sub(r"[^A-Za-z0-9._=@+-]", "-", part).lstrip("._=@+-") or "x" for part in directory.parts[1:])
    return name[-_LONGEST_NAME:].lstrip("/._=@+-")
