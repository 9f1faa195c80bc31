"""The object stores of the contract suite, with separate servers on this machine, for benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.harness import ROOT

sys.path.append(str(ROOT / "tests"))  # they belong to the contract suite
from object_engines import ENGINES, Engine, MooncakeEngine, SeaweedEngine

_MOONCAKE_BYTES = (1 << 30, 1 << 30)
_SEAWEED_VOLUMES = 100


def start_engines(stack: ExitStack, directory: Path, names: Iterable[str]) -> tuple[dict[str, Engine], dict[str, str]]:
    """Start object stores, which end with the stack.

    Args:
        stack: stops them.
        directory: directory for their data and logs; it must outlive them.
        names: keys of `ENGINES` to start.

    Returns:
        The running object stores, and for each of the others the reason why it is unavailable.
    """
    running: dict[str, Engine] = {}
    missing: dict[str, str] = {}
    for name in names:
        (directory / name).mkdir()
        engine = ENGINES[name](directory / name)
        if isinstance(engine, MooncakeEngine):
            # A removed object keeps its memory until its lease ends, and a benchmark puts again before that.
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
