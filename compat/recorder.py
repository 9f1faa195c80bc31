"""Records each call of a data plane's module: its arguments, its answer or error, and its duration.

Each process has its own file with one msgpack object per call, appended before the call returns to its caller. So the
file of a killed process has all the answers it got.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack

from compat.plain_values import plain

MODULE_CALLS = (
    "init",
    "close",
    "kv_put",
    "kv_batch_put",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_list",
    "kv_clear",
    "async_kv_put",
    "async_kv_batch_put",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_list",
    "async_kv_clear",
    "save_checkpoint",
    "load_checkpoint",
)
# Recorded calls of the client that `get_client` returns; its other methods are passed through.
CLIENT_CALLS = (
    "get_meta",
    "get_data",
    "put",
    "set_custom_meta",
    "clear_samples",
    "clear_partition",
    "check_consumption_status",
    "check_production_status",
    "get_consumption_status",
    "get_production_status",
    "reset_consumption",
    "get_partition_list",
    "kv_retrieve_meta",
    "kv_retrieve_keys",
    "kv_list",
)
# Their arguments and answers are paths and configurations specific to each system.
_OPAQUE = frozenset({"init", "close"})

Watcher = Callable[[str, dict[str, Any]], None]


class Recorder:
    """Records the calls of this process.

    Args:
        directory: directory for its file; created if missing.
        role: returns the role of this process, the same in each run; called once, at the first call.
    """

    def __init__(self, directory: Path, role: Callable[[], str]) -> None:
        self._directory = directory
        self._role = role
        self._lock = threading.Lock()
        self._file: int | None = None
        self._watchers: list[Watcher] = []

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` with the name and the arguments of each call before it is made."""
        self._watchers.append(watcher)

    def note(self, call: str, given: Any, *, seconds: float = 0.0, answer: Any = None, error: str = "") -> None:
        """Record a call; `given` and `answer` are plain data."""
        entry = {"call": call, "given": given, "at": time.time(), "seconds": seconds}
        packed = msgpack.packb({**entry, **({"error": error} if error else {"answer": answer})})
        with self._lock:
            if self._file is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                path = self._directory / f"{self._role()}.{os.getpid()}.msgpack"
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(self._file, packed)

    def install(self, module: ModuleType) -> None:
        """Record each call of a module from now on, and of the client it returns."""
        for name in MODULE_CALLS:
            setattr(module, name, self.recorded(name, getattr(module, name)))
        get_client = module.get_client
        module.get_client = lambda: _RecordedClient(get_client(), self)  # type: ignore[attr-defined]

    def recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that records the calls of another function or coroutine function."""
        signature = inspect.signature(function)
        signature = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "self"])

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = dict(signature.bind(*args, **kwargs).arguments)
            if "checkpoint_dir" in given:
                given["checkpoint_dir"] = Path(given["checkpoint_dir"]).name
            written = {} if name in _OPAQUE else plain({**given, **_counted(given)})
            for watcher in self._watchers:
                watcher(name, given)
            return written

        def end(given: Any, started: float, answer: Any) -> Any:
            seconds = time.perf_counter() - started
            if name.endswith("kv_list"):
                answer = _sorted(answer)
            self.note(name, given, seconds=seconds, answer=None if name in _OPAQUE else plain(answer))
            return answer

        def fail(given: Any, started: float, error: Exception) -> None:
            self.note(name, given, seconds=time.perf_counter() - started, error=builtin_name(error))

        if inspect.iscoroutinefunction(function) or name.startswith("async_"):

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                given, started = begin(args, kwargs), time.perf_counter()
                try:
                    answer = await function(*args, **kwargs)
                except Exception as error:
                    fail(given, started, error)
                    raise
                return end(given, started, answer)

            return call_async

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given, started = begin(args, kwargs), time.perf_counter()
            try:
                answer = function(*args, **kwargs)
            except Exception as error:
                fail(given, started, error)
                raise
            return end(given, started, answer)

        return call


class _RecordedClient:
    """A client whose calls are recorded; everything else is passed through."""

    def __init__(self, client: Any, recorder: Recorder) -> None:
        self._client = client
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        known = name.removeprefix("async_") in CLIENT_CALLS
        return self._recorder.recorded(f"client.{name}", value) if known else value


def _counted(given: dict[str, Any]) -> dict[str, Any]:
    """Replace indexes by their number: each system numbers samples differently."""
    return {"global_indexes": len(given["global_indexes"])} if "global_indexes" in given else {}


def builtin_name(error: BaseException) -> str:
    """Return the name of an error's closest builtin class, which callers independent of the system would catch."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the calls of one file in order; an incomplete last one is left out."""
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(path.read_bytes())
    yield from unpacker


def _sorted(listed: Any) -> Any:
    """Sort partitions and keys by name: the order of puts is a race between processes."""
    if not isinstance(listed, dict):
        return listed
    return {partition_id: dict(sorted(listed[partition_id].items())) for partition_id in sorted(listed)}
