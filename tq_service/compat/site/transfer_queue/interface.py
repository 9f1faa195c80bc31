"""TransferQueue's calls by key, sync and as `async_...`, and its checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Any, Final

from transfer_queue.client import Calls, finished
from transfer_queue.controller import OWN_CHECKPOINT_DIR
from transfer_queue.session import close, current, get_client, init, setting

__all__ = [
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]
METADATA_FILE: Final = "metadata.json"
_LONGEST_NAME: Final = 200


def _forms(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the sync and the async function that make a call of this process's client."""
    described = wraps(getattr(Calls, name))
    parameters = list(signature(getattr(Calls, name)).parameters.values())

    @described
    def call(*arguments: Any, **keywords: Any) -> Any:
        return finished(getattr(current().client.sync_calls, name)(*arguments, **keywords))

    @described
    async def async_call(*arguments: Any, **keywords: Any) -> Any:
        return await getattr(current().client.async_calls, name)(*arguments, **keywords)

    for function, its_name in ((call, name), (async_call, f"async_{name}")):
        function.__dict__["__signature__"] = Signature(parameters[1:])  # without the method's own object
        function.__name__ = function.__qualname__ = its_name
    return call, async_call


kv_put, async_kv_put = _forms("kv_put")
kv_batch_put, async_kv_batch_put = _forms("kv_batch_put")
kv_batch_get, async_kv_batch_get = _forms("kv_batch_get")
kv_batch_get_by_meta, async_kv_batch_get_by_meta = _forms("kv_batch_get_by_meta")
kv_list, async_kv_list = _forms("kv_list")
kv_clear, async_kv_clear = _forms("kv_clear")


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Write a checkpoint of the run's partitions, in place of one that is there.

    The service writes it below its directory for checkpoints: into `checkpoint_dir` itself where that lies below
    `controller.checkpoint_dir`, else under a name made of the path. `checkpoint_dir` gets a file that says so.

    Args:
        checkpoint_dir: the directory; made where it is not there.
        include_storage: not looked at: the data is always included.
        metadata: what `metadata.json` there has as "user_metadata".

    Raises:
        RuntimeError: there is no run. PreconditionError: the service has no directory for checkpoints.
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
    """Put what a checkpoint holds in place of the run's partitions.

    Raises:
        FileNotFoundError: the directory has none. RuntimeError: there is no run.
    """
    session = current()
    content = json.loads((Path(checkpoint_dir) / METADATA_FILE).read_text())
    session.client.sync_client.restore(content["checkpoint"], replace=True)


def get_metrics_endpoint() -> str | None:
    """Return `metrics.endpoint` of the configuration: host and port that serve metrics; None: none do, or no run."""
    try:
        conf = current().run.conf
    except RuntimeError:
        return None
    endpoint: str | None = setting(conf, "metrics", "endpoint")
    return endpoint


def _checkpoint_name(directory: Path, top: str | None) -> str:
    """Return the name of a directory's checkpoint below the service's directory for checkpoints."""
    if top is not None and directory.is_relative_to(Path(top).absolute()):
        return str(directory.relative_to(Path(top).absolute()))
    name = "/".join(re.sub(r"[^A-Za-z0-9._=@+-]", "-", part).lstrip("._=@+-") or "x" for part in directory.parts[1:])
    return name[-_LONGEST_NAME:].lstrip("/._=@+-")
