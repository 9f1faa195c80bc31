"""The recorder of this process: its directory and its role."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from compat.recorder import Recorder

DIRECTORY_VARIABLE = "TQ_COMPAT_RECORD"
RUN_VARIABLE = "TQ_COMPAT_RUN"
AGENT, TRAINER = "agent", "trainer"


@functools.cache
def recorder() -> Recorder:
    """Return the recorder of this process."""
    return Recorder(Path(os.environ[DIRECTORY_VARIABLE]), role)


def role() -> str:
    """Return the role of this process: AGENT, TRAINER, or "rank-" and its number."""
    import ray

    if "RANK" in os.environ:
        return f"rank-{os.environ['RANK']}"
    name = ray.get_runtime_context().get_actor_name() or ""
    return AGENT if name.startswith("agent_loop_worker") else TRAINER
