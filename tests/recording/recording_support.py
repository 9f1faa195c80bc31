"""What tests of recordings share: an engine with puts, steps of these, and a comparison of what ranks got."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "storage"))
from engine_driver import PARTITION, begin, cells, put_id, receive, runs

from tq_service.recording.layout import RecordedStep
from tq_service.state.ledger import RecordedPlan
from tq_service.storage.engine import StorageEngine

__all__ = ["PARTITION", "cells", "put_id", "receive", "runs", "step_of", "store"]


async def store(engine: StorageEngine, number: int, data: Mapping[str, Any]) -> bytes:
    """Put data into an engine; return the id of the put."""
    pending, chunks = await begin(engine, number, data)
    for chunk in chunks:
        await pending.write(chunk)
    await engine.flush(pending)
    pending.finish()
    engine.confirm(put_id(number))
    return put_id(number)


def step_of(batch_index: int, *, task_name: str = "train", incarnation: bytes = b"i" * 16) -> RecordedStep:
    """Return a step as it is when it is planned; its metadata is none that a rank gets."""
    return RecordedStep(
        number=0,
        version="0",
        partition_id=PARTITION,
        incarnation=incarnation,
        task_name=task_name,
        epoch=0,
        batch_index=batch_index,
        recorded_at=1.0,
        plan=RecordedPlan(rows=np.arange(2), sizes=(1, 1)),
        batch_spec=None,
        meta=b"",
    )
