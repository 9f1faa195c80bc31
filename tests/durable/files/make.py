"""Makes the files that `test_files.py` opens: one of each kind that is written to disk.

They are made once, and read by all versions since. Where the format of a kind changes, its old file stays, with a
reader for it, and a new one is added. Until the first release, `python tests/durable/files/make.py` regenerates them.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent.parent))
sys.path.append(str(Path(__file__).parent.parent))
sys.path.append(str(Path(__file__).parent.parent.parent / "storage"))
sys.path.append(str(Path(__file__).parent.parent.parent / "core"))

import numpy as np
from domain_support import batch_spec, plan_of
from durable_driver import put
from engine_driver import cells, compacted
from live_server import LiveServer, LoopThread
from test_change_stages import STORY

from tq_service.durable.state_store import Recovered, StateStore
from tq_service.journal import files as journal_files
from tq_service.machine.claims import EndReached, SamplesClaimed, TaskSeen
from tq_service.samplers import PlanRunner
from tq_service.schema import EndCounts
from tq_service.serving.catalog import Catalog
from tq_service.state.plan import LeaseTerms
from tq_service.storage.blobs.segments import SegmentBlobs
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index.put_table import PutJournal

HERE = Path(__file__).parent
LEASED_LATER = {"plan": plan_of(range(4, 6)), "lease": LeaseTerms(seconds=60.0, max_deliveries=3)}
REUSING = replace(plan_of([7, 8], [7]), consumed=np.array([8]))
OTHER_TASK = {"partition_id": "train", "task_name": "other"}
CHANGES = [
    *STORY[:-1],  # the last one clears the partition
    TaskSeen(**OTHER_TASK),
    SamplesClaimed(batch_spec=batch_spec(), plan=plan_of([1, 2], [3]), **OTHER_TASK),
    SamplesClaimed(batch_spec=batch_spec(max_uses=2), plan=REUSING, **OTHER_TASK),
    SamplesClaimed(request_id=b"3" * 16, **LEASED_LATER, **OTHER_TASK),
    SamplesClaimed(request_id=b"4" * 16, plan=plan_of([7]), claim_name="a", batch_spec=batch_spec(), **OTHER_TASK),
    EndReached(claim_name="b", end=EndCounts(consumed_count=4), **OTHER_TASK),
]
BOOT_ID = bytes(range(16))
DATA: dict[str, Any] = {
    "dense": np.arange(12).reshape(4, 3),
    "jagged": [np.arange(row) for row in range(4)],
    "object": ["a", {"b": 1}, None, "dddd"],
}


def recover_puts(store: StateStore, catalog: Catalog | None = None) -> tuple[StorageEngine, Recovered]:
    journal = PutJournal(SegmentBlobs(store.data_dir.segments_path))
    engine = StorageEngine(max_bytes=None, boot_id=BOOT_ID, backing=journal)
    return engine, store.recover(catalog=catalog, puts=journal)


async def make_changes(store: StateStore) -> None:
    """Every change there is, but for that which would leave nothing to look at."""
    catalog = Catalog(PlanRunner())
    store.recover(catalog=catalog)
    for change in CHANGES:
        catalog.commit(change)


async def make_puts(store: StateStore) -> None:
    """Small puts: a whole one, one of which rows and a column are gone, one that was dropped."""
    engine, _ = recover_puts(store)
    await make_puts_of(engine)


async def make_puts_of(engine: StorageEngine) -> None:
    for number in (1, 2, 3):
        await put(engine, number, DATA)
    engine.free([cells(2, 0, 1, 2, fields=("dense", "jagged")), cells(2, fields=("object",)), cells(3)])
    await compacted(engine)


async def make_snapshot(store: StateStore) -> None:
    """All of the above at once, and a log that goes on from it."""
    catalog = Catalog(PlanRunner())
    engine, _ = recover_puts(store, catalog)
    for change in CHANGES:
        catalog.commit(change)
    await make_puts_of(engine)
    await store.take_snapshot()


async def make(directory: Path, write: Any) -> None:
    store = StateStore.open(directory, sync=False)
    await write(store)
    await store.close()


def make_checkpoint(directory: Path) -> None:
    """Samples with values of each layout, keys, groups, custom_meta, and a claim."""
    loop = LoopThread()
    with LiveServer(loop, checkpoint_dir=directory) as server:
        client = server.client()
        client.put("train",
            DATA, keys=list("abcd"), groups=["g", "g", "h", "h"],
            custom_meta=[{"total_lengths": row} for row in range(4)],
        )  # fmt: skip
        client.get_meta(
            partition_id="train",
            task_name="t",
            data_fields=["dense"],
            batch_size=2,
            dp_rank=0,
            dp_size=1,
            batch_index=0,
        )
        client.checkpoint("all")
    loop.stop()


def main() -> None:
    journal_files.machine_boot_id = lambda: "the machine that made this file"
    for kind, write in (("changes", make_changes), ("puts", make_puts), ("snapshot", make_snapshot)):
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(make(Path(directory), write))
            shutil.rmtree(HERE / kind, ignore_errors=True)
            (HERE / kind).mkdir()
            newest = max(Path(directory).glob("*.tqj"))
            files = [*Path(directory).glob("*.tqs"), newest, Path(directory) / "identity.json"]
            for path in files:
                shutil.copy(path, HERE / kind)
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint(Path(directory))
        (HERE / "checkpoint").mkdir(exist_ok=True)
        shutil.copy(Path(directory) / "all" / "checkpoint.tqc", HERE / "checkpoint")


if __name__ == "__main__":
    main()
