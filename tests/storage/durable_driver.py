"""A data directory with a journal in memory, and the engines that come and go over it."""

from engine_driver import begin, begin_shared, compacted, put_id, share

from tq_service.storage import engine as engine_module
from tq_service.storage.blobs import segments
from tq_service.storage.blobs.segments import SegmentBlobs
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index.put_table import PutJournal
from tq_service.wire.columns import iter_frames

BOOT = bytes(range(16))


class Directory:
    """What is left of engines that end without a word: their segments, and the records that were durable."""

    def __init__(self, path, *, sync=False, **settings):
        self.path = path
        self.sync = sync
        self.settings = {"max_bytes": None, "boot_id": BOOT, **settings}
        self.min_free_bytes = 0
        self.records = []
        self.durable_count = 0
        self._callbacks = []
        self.engine = None

    def open(self):
        """Start an engine; what an earlier one had not made durable is gone."""
        del self.records[self.durable_count :]
        self.records, self._callbacks = list(self.records), []  # those of the engine before lead nowhere
        if self.engine is not None:
            self._end(self.engine)
        blobs = SegmentBlobs(self.path / "segments", sync=self.sync, min_free_bytes=self.min_free_bytes)
        self.journal = PutJournal(blobs)
        self.engine = StorageEngine(backing=self.journal, **self.settings)
        self.journal.recover(list(self.records), _Log(self.records, self._callbacks))
        return self.engine

    def _end(self, engine):
        """Wait for threads of an engine that would have ended with its process."""
        engine._is_closed = True
        if engine._compaction is not None:
            engine._compaction.cancel()
        engine_module._COPIER.submit(int).result()
        engine._store._executor.shutdown()
        segments._BACKGROUND.submit(int).result()

    def flush(self):
        """Make durable what was written down."""
        self.durable_count = len(self.records)
        while self._callbacks:
            self._callbacks.pop(0)()

    def snapshot(self):
        """Go on from what is there now, as a snapshot and a new journal do."""
        self.flush()
        self.records[:] = list(self.journal.records())
        self.durable_count = len(self.records)

    def segments(self):
        """Return the files that are there, by number."""
        return {int(path.stem): path for path in sorted((self.path / "segments").glob("*.seg"))}


class _Log:
    """The way of one engine to its directory."""

    def __init__(self, records, callbacks):
        self._records = records
        self.after_durable = callbacks.append

    def fatal(self, reason, cause):
        raise AssertionError(reason) from cause

    def append_put(self, record, values=b""):
        self._records.append(record + values)


async def put(engine, number, data, *, shared=False, confirm=True):
    if shared:
        pending, columns = await begin_shared(engine, number, data)
        await share(pending, columns)
    else:
        pending, chunks = await begin(engine, number, data)
        for parts in iter_frames(chunks, 1 << 16):
            await pending.write(b"".join(parts))
    await engine.flush(pending)
    pending.finish()
    if confirm:
        engine.confirm(put_id(number))


async def settled(directory):
    """Let what waits for recovered puts be done, and the moves of compacted ones be written down."""
    engine = directory.engine
    while engine._when_fetched:
        await engine.check(list(engine._when_fetched))
    await compacted(engine)
    directory.flush()
