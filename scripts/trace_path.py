#!/usr/bin/env python3
"""Show through which files of the service one put, one get, one leased claim and one acknowledgement pass.

A service runs in this process and a client calls it over gRPC. A file counts for an operation
when a function of it, or a method that a dataclass of it generates, runs on any thread before the service is at rest
again; module and class bodies do not count. Each operation is repeated after a warm-up, and a file counts if it ran
in all repetitions. What runs once, such as an import, or now and then, such as the growth of a column or a background
task, is not on the path.

  put            new rows in a partition that no task consumes
  get            a field of a batch that a queue worker has claimed
  put-consumed   new rows in a partition that a task consumes, all of whose samples are acknowledged
  claim          those rows, by a queue worker under a lease
  ack            of that claim

scripts/trace_path.py                          print the number of files by layer
scripts/trace_path.py --files                  and the files
scripts/trace_path.py --most put=34 claim=30   fail if more files are passed, generated ones apart
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import CodeType, FrameType

import numpy as np

import tq_service as tq
from tq_service.config import load_settings
from tq_service.server import process
from tq_service.server.app import running

PACKAGE = Path(tq.__file__).parent
WARM_UP_COUNT = 4
REPETITION_COUNT = 7
ROW_COUNT = 4
FIELD = "prompt"
GENERATED = "v1"
OPERATIONS = ("put", "put-consumed", "claim", "get", "ack")
REST_SECONDS = 0.1  # a call ends a little after the client has its answer, and its records are flushed within 0.05 s

Paths = dict[str, list[str]]  # by operation: the files it passes through, relative to the package


class Recorder:
    """Records the files whose functions are entered on any thread, while it is recording.

    It must be made before the threads that it shall see: `threading.setprofile` is for those that start later.
    """

    def __init__(self) -> None:
        self._entered: set[tuple[CodeType, str]] | None = None
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        # Other threads may be here while recording ends: what they add then goes to a set that is not looked at again.
        entered = self._entered
        if event == "call" and entered is not None and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            # Methods that a dataclass generates have no file of their own; their globals are those of its module.
            entered.add((frame.f_code, frame.f_globals.get("__file__") or ""))

    def start(self) -> None:
        """Forget what was recorded, and record from now on."""
        self._entered = set()

    def stop(self) -> set[str]:
        """Record nothing more; return the files of the package, relative to it."""
        entered, self._entered = self._entered or set(), None
        paths = (Path(code.co_filename if "<" not in code.co_filename else file) for code, file in entered.copy())
        return {path.relative_to(PACKAGE).as_posix() for path in paths if path.is_relative_to(PACKAGE)}

    def close(self) -> None:
        """Let threads run unobserved again."""
        sys.setprofile(None)
        threading.setprofile(None)


async def trace(directory: Path) -> Paths:
    """Run a service and a client, and return the path of each operation."""
    recorder = Recorder()
    counts: dict[str, Counter[str]] = {operation: Counter() for operation in OPERATIONS}
    # A directory of its own for the socket: other services of this host look at the sockets in the one that they share.
    flags = {"port": 0, "shared_memory_dir": directory / "sockets", "data_dir": directory / "data"}
    settings = load_settings(flags).settings
    # Garbage is collected by the clock: on a busy machine in most of the repetitions, and yet by none of them.
    process._YOUNG_COLLECTION_SECONDS = 3600.0
    try:
        async with (
            running(settings) as app,
            tq.AsyncClient(f"127.0.0.1:{app.port}") as client,
        ):
            for index in range(WARM_UP_COUNT + REPETITION_COUNT):
                async for operation, files in _one_round(client, recorder):
                    if index >= WARM_UP_COUNT:
                        counts[operation].update(files)
    finally:
        recorder.close()
    return {
        operation: sorted(file for file, count in counter.items() if count == REPETITION_COUNT)
        for operation, counter in counts.items()
    }


async def _one_round(client: tq.AsyncClient, recorder: Recorder) -> AsyncIterator[tuple[str, set[str]]]:
    """Do each operation once; yield the files that it entered."""
    rows = {FIELD: np.arange(ROW_COUNT)}
    recorder.start()
    await client.put(rows, partition_id="not-consumed")
    yield "put", await _stopped(recorder)
    recorder.start()
    await client.put(rows, partition_id="consumed")
    yield "put-consumed", await _stopped(recorder)
    recorder.start()
    meta = await client.get_meta(
        partition_id="consumed", task_name="reward", data_fields=[FIELD], batch_size=ROW_COUNT, lease=600.0
    )
    yield "claim", await _stopped(recorder)
    recorder.start()
    await client.get_data(meta)
    yield "get", await _stopped(recorder)
    recorder.start()
    await client.ack(meta)
    yield "ack", await _stopped(recorder)


async def _stopped(recorder: Recorder) -> set[str]:
    await asyncio.sleep(REST_SECONDS)
    return recorder.stop()


def layer_of(file: str) -> str:
    """Return the layer of a file, or its own name where it is one by itself."""
    return file.partition("/")[0].removesuffix(".py")


def written_of(files: list[str]) -> list[str]:
    """Return the files that are written by hand."""
    return [file for file in files if layer_of(file) != GENERATED]


def report(paths: Paths, *, with_files: bool) -> str:
    """Return the table of files by operation and layer, and the files if they are wanted."""
    layers = sorted({layer_of(file) for files in paths.values() for file in written_of(files)})
    lines = [" ".join(f"{title:>12}" for title in ("operation", *layers, "together"))]
    for operation, files in paths.items():
        count = Counter(map(layer_of, files))
        figures = (*(count[layer] for layer in layers), len(written_of(files)))
        lines.append(" ".join(f"{figure:>12}" for figure in (operation, *figures)))
    for operation, files in paths.items() if with_files else ():
        lines += ["", operation, *(f"  {file}" for file in written_of(files))]
    return "\n".join(lines)


def too_long(paths: Paths, most: list[tuple[str, int]]) -> list[str]:
    """Return a line for each path that exceeds its limit."""
    return [
        f"{operation}: {found} files, expected {limit} at most"
        for operation, limit in most
        if (found := len(written_of(paths[operation]))) > limit
    ]


def limit(text: str) -> tuple[str, int]:
    """Return operation and number of `put=14`."""
    operation, _, number = text.partition("=")
    if operation not in OPERATIONS or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(OPERATIONS)}, '=' and a number, got {text!r}")
    return operation, int(number)


def main() -> int:
    """Trace, print, and return 1 if a path is longer than it may be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="print the files, too")
    parser.add_argument("--most", type=limit, nargs="+", default=[], metavar="OPERATION=NUMBER", help="fail beyond it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        paths = asyncio.run(trace(Path(directory)))
    print(report(paths, with_files=arguments.files))
    wrong = too_long(paths, arguments.most)
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
