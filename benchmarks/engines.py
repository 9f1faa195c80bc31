"""The engines of the contract suite, with servers of their own on this machine, for benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.harness import ROOT

sys.path.append(str(ROOT / "tests"))  # where the contract suite has them
from object_engines import ENGINES, Engine, MooncakeEngine, SeaweedEngine

_MOONCAKE_BYTES = (1 << 30, 1 << 30)
_SEAWEED_VOLUMES = 100


def start_engines(stack: ExitStack, directory: Path, names: Iterable[str]) -> tuple[dict[str, Engine], dict[str, str]]:
    """Start engines, which end with the stack.

    Args:
        stack: stops them.
        directory: gets their data and logs; it must be there for longer than they run.
        names: which ones, keys of `ENGINES`.

    Returns:
        The engines that run, and why each of the others is not here.
    """
    running: dict[str, Engine] = {}
    missing: dict[str, str] = {}
    for name in names:
        (directory / name).mkdir()
        engine = ENGINES[name](directory / name)
        if isinstance(engine, MooncakeEngine):
            # What is removed keeps its memory until its lease is over, and a benchmark puts again before that.
            engine.offered_bytes = _MOONCAKE_BYTES
        elif isinstance(engine, SeaweedEngine):
            engine.volume_count = _SEAWEED_VOLUMES
        stack.callback(engine.stop)
        try:
            engine.start()
        except pytest.skip.Exception as reason:
            missing[name] = str(reason)
        else:
            running[name] = engine
    return running, missing
