"""Steps are written behind, whole or not at all; the oldest go; nothing that fails stops the service."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recording_support import cells, put_id, receive, runs, step_of, store

from tq_service.errors import DataDirError, DataLossError, InvalidArgumentError, NotFoundError, UnavailableError
from tq_service.objects.base import Buffer
from tq_service.recording.layout import PutPlace
from tq_service.recording.places import Directory, Objects, Place, place_of
from tq_service.recording.reading import Asked, Recording
from tq_service.recording.recorder import Recorder
from tq_service.storage.blobs import segments as segments_module
from tq_service.storage.blobs.segments import SegmentBlobs
from tq_service.storage.engine import StorageEngine
from tq_service.storage.index.put_table import PutJournal

LARGE = {"x": np.arange(200_000, dtype=np.float64).reshape(2, -1)}
SMALL = {"x": np.arange(2)}


class NoLog:
    """Keeps no records of puts."""

    fatal = staticmethod(pytest.fail)

    def append_put(self, record: bytes, values: bytes | bytearray = b"") -> None:
        pass

    def after_durable(self, callback: Callable[[], None]) -> None:
        callback()


@pytest.fixture(params=["memory", "segments"])
async def engine(request: Any, tmp_path: Path) -> AsyncIterator[StorageEngine]:
    backing = None
    if request.param == "segments":
        backing = PutJournal(SegmentBlobs(tmp_path / "data", min_free_bytes=0))
    engine = StorageEngine(max_bytes=None, backing=backing)
    if backing is not None:
        backing.recover((), NoLog())
    yield engine
    await engine.close()


def directory(path: Path, **options: Any) -> Directory:
    return Directory(path / "recording", **{"least_free_bytes": 0, **options})


@asynccontextmanager
async def recording_to(place: Place, **options: Any) -> AsyncIterator[Recorder]:
    recorder = Recorder(place, **options)
    await recorder.open()
    running = asyncio.create_task(recorder.run())
    try:
        yield recorder
        await recorder.close()
    finally:
        running.cancel()


@asynccontextmanager
async def reading_from(place: Place) -> AsyncIterator[Recording]:
    recording = Recording(place)
    await recording.open()
    yield recording
    await recording.close()


def note(recorder: Recorder, engine: StorageEngine, batch_index: int, puts: Sequence[bytes]) -> None:
    recorder.take(step_of(batch_index), puts, engine.keep)()


async def written(recorder: Recorder, count: int) -> None:
    """Wait until so many steps were recorded, and those that are too many were removed."""
    async with asyncio.timeout(60):
        while recorder.status().recorded_step_count < count:  # noqa: ASYNC110  (nothing tells it)
            await asyncio.sleep(0.01)
        await recorder._is_idle.wait()


def values_of(place: PutPlace, data: memoryview) -> np.ndarray[Any, Any]:
    (column,) = place.record.columns
    return np.frombuffer(data[-column.value_bytes :], column.dtype)


async def test_a_step_has_the_bytes_of_its_puts_although_they_were_freed_at_once(
    engine: StorageEngine, tmp_path: Path
) -> None:
    await store(engine, 1, LARGE)
    await store(engine, 2, SMALL)
    async with recording_to(directory(tmp_path)) as recorder:
        note(recorder, engine, 0, [put_id(1), put_id(2)])
        for _ in engine.delete_owned(b""):
            pass
        await store(engine, 3, {"x": -LARGE["x"]})  # into the memory or file that is free now, if any is
    async with reading_from(directory(tmp_path)) as recording:
        step = recording.one(Asked(task_name="train", batch_index=0))
        large, small = [values_of(place, await recording.read_put(place)) for place in step.puts]
    assert np.array_equal(large, LARGE["x"].ravel())
    assert np.array_equal(small, SMALL["x"])


async def test_a_put_is_recorded_once_however_many_steps_name_it(engine: StorageEngine, tmp_path: Path) -> None:
    await store(engine, 1, LARGE)
    async with recording_to(directory(tmp_path)) as recorder:
        for index in range(4):
            note(recorder, engine, index, [put_id(1)])
        await written(recorder, 4)
        assert recorder.status().stored_bytes < 1.1 * LARGE["x"].nbytes
    async with recording_to(directory(tmp_path)) as recorder:  # also after a restart
        note(recorder, engine, 4, [put_id(1)])
        await written(recorder, 1)
        assert recorder.status().step_count == 5
        assert recorder.status().stored_bytes < 1.1 * LARGE["x"].nbytes
    on_disk = sum(path.stat().st_size for path in (tmp_path / "recording").rglob("*") if path.is_file())
    assert on_disk < 1.1 * LARGE["x"].nbytes


async def test_files_of_the_data_directory_are_kept_and_not_copied(tmp_path: Path) -> None:
    backing = PutJournal(SegmentBlobs(tmp_path / "data", min_free_bytes=0))
    engine = StorageEngine(max_bytes=None, backing=backing)
    backing.recover((), NoLog())
    await store(engine, 1, LARGE)
    async with recording_to(directory(tmp_path)) as recorder:
        note(recorder, engine, 0, [put_id(1)])
        await written(recorder, 1)
        status = recorder.status()
        assert (status.copied_bytes, status.linked_bytes) == (0, LARGE["x"].nbytes)
        (kept,) = (tmp_path / "recording" / "puts").iterdir()
        (segment,) = (tmp_path / "data").iterdir()
        assert kept.stat().st_ino == segment.stat().st_ino
        assert LARGE["x"].nbytes <= kept.stat().st_size <= LARGE["x"].nbytes * 17 / 16
    await engine.close()


async def test_files_that_a_recording_removes_serve_other_puts(tmp_path: Path) -> None:
    segments = SegmentBlobs(tmp_path / "data", min_free_bytes=0)
    backing = PutJournal(segments)
    engine = StorageEngine(max_bytes=None, backing=backing)
    backing.recover((), NoLog())
    exact = {"x": np.arange(1 << 17, dtype=np.float64)}  # as large as its file
    inodes = []
    async with recording_to(directory(tmp_path, segments=segments), most_steps=1) as recorder:
        for number in range(1, 6):
            await store(engine, number, {"x": exact["x"] + number})
            note(recorder, engine, number, [put_id(number)])
            engine.free([cells(number)])
            await written(recorder, number)
            segments_module._BACKGROUND.submit(int).result()  # until the engine's name of the file is gone
            (kept,) = (tmp_path / "recording" / "puts").iterdir()
            inodes.append(kept.stat().st_ino)
    assert len(set(inodes)) < len(inodes)
    async with reading_from(directory(tmp_path)) as recording:
        (step,) = recording.steps
        assert np.array_equal(values_of(step.puts[0], await recording.read_put(step.puts[0])), exact["x"] + 5)
    await engine.close()


async def test_a_file_with_another_name_serves_no_other_put(tmp_path: Path) -> None:
    segments = SegmentBlobs(tmp_path / "data", min_free_bytes=0)
    backing = PutJournal(segments)
    engine = StorageEngine(max_bytes=None, backing=backing)
    backing.recover((), NoLog())
    await store(engine, 1, {"x": np.arange(1 << 17, dtype=np.float64)})
    async with recording_to(directory(tmp_path, segments=segments), most_steps=1) as recorder:
        note(recorder, engine, 1, [put_id(1)])
        note(recorder, engine, 2, [])
        await written(recorder, 2)
    assert list((tmp_path / "recording" / "puts").iterdir()) == []
    assert segments.pooled_bytes == 0
    with engine.open_read([runs(["x"], (0, 0, 1 << 17))], [put_id(1)]) as reading:
        assert np.array_equal(receive(reading)["x"], np.arange(1 << 17, dtype=np.float64))
    await engine.close()


async def test_the_oldest_steps_go_with_the_puts_that_no_other_names(engine: StorageEngine, tmp_path: Path) -> None:
    for number in range(1, 5):
        await store(engine, number, LARGE)
    async with recording_to(directory(tmp_path), most_steps=2) as recorder:
        note(recorder, engine, 0, [put_id(1), put_id(2)])
        note(recorder, engine, 1, [put_id(2), put_id(3)])
        note(recorder, engine, 2, [put_id(4)])
        await written(recorder, 3)
    status = recorder.status()
    assert (status.step_count, status.removed_step_count) == (2, 1)
    async with reading_from(directory(tmp_path)) as recording:
        assert [step.batch_index for step in recording.steps] == [1, 2]
        for step in recording.steps:
            for place in step.puts:
                assert np.array_equal(values_of(place, await recording.read_put(place)), LARGE["x"].ravel())


async def test_a_recording_is_bounded_by_bytes_and_keeps_the_last_step(engine: StorageEngine, tmp_path: Path) -> None:
    async with recording_to(directory(tmp_path), most_bytes=int(2.5 * LARGE["x"].nbytes)) as recorder:
        for number in range(1, 6):
            await store(engine, number, LARGE)
            note(recorder, engine, number, [put_id(number)])
        await written(recorder, 5)
    assert recorder.status().step_count == 2
    on_disk = sum(path.stat().st_size for path in (tmp_path / "recording").rglob("*") if path.is_file())
    assert on_disk < 2.5 * LARGE["x"].nbytes
    async with recording_to(directory(tmp_path), most_bytes=1) as recorder:
        await store(engine, 6, LARGE)
        note(recorder, engine, 6, [put_id(6)])
        await written(recorder, 1)
    async with reading_from(directory(tmp_path)) as recording:
        assert [step.batch_index for step in recording.steps] == [6]
        await recording.read_put(recording.steps[0].puts[0])


async def test_what_a_kill_has_cut_off_is_removed_and_numbers_go_on(engine: StorageEngine, tmp_path: Path) -> None:
    await store(engine, 1, LARGE)
    async with recording_to(directory(tmp_path)) as recorder:
        note(recorder, engine, 0, [put_id(1)])
    puts, steps = tmp_path / "recording" / "puts", tmp_path / "recording" / "steps"
    (puts / "00000000-1").write_bytes(b"of a step that was not written")
    (puts / "00000000-2.part").write_bytes(b"half")
    (steps / "000000000009-00000000.part").write_bytes(b"half")
    async with recording_to(directory(tmp_path)) as recorder:
        assert len(list(puts.iterdir())) == len(list(steps.iterdir())) == 1
        note(recorder, engine, 1, [put_id(1)])
    async with reading_from(directory(tmp_path)) as recording:
        assert [(step.number, step.batch_index) for step in recording.steps] == [(1, 0), (2, 1)]


async def test_a_full_disk_ends_the_recording_and_nothing_else(engine: StorageEngine, tmp_path: Path) -> None:
    await store(engine, 1, LARGE)
    async with recording_to(directory(tmp_path, least_free_bytes=1 << 62)) as recorder:
        note(recorder, engine, 0, [put_id(1)])
        note(recorder, engine, 1, [put_id(1)])
    status = recorder.status()
    assert not status.is_recording
    assert "is out of space" in status.error
    assert status.pending_bytes == 0
    assert not engine.puts[put_id(1)].values.is_pinned
    note(recorder, engine, 2, [put_id(1)])
    assert not engine.puts[put_id(1)].values.is_pinned


class Flaky(Directory):
    """Does not answer some times."""

    failures = 0

    async def write(self, name: str, parts: Sequence[Buffer]) -> None:
        if self.failures:
            self.failures -= 1
            raise UnavailableError("the place does not answer")
        await super().write(name, parts)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tq_service.recording.recorder._PAUSES_SECONDS", (0.01, 0.01))


@pytest.mark.usefixtures("impatient")
async def test_a_place_that_does_not_answer_is_tried_again(engine: StorageEngine, tmp_path: Path) -> None:
    await store(engine, 1, SMALL)
    await store(engine, 2, LARGE)
    place = Flaky(tmp_path / "recording", least_free_bytes=0)
    async with recording_to(place) as recorder:
        place.failures = 2
        note(recorder, engine, 0, [put_id(1), put_id(2)])
        await written(recorder, 1)
        assert recorder.status().is_recording
        place.failures = 100
        note(recorder, engine, 1, [put_id(1)])
    assert "does not answer" in recorder.status().error
    async with reading_from(directory(tmp_path)) as recording:
        (step,) = recording.steps
        for place_of_put in step.puts:
            await recording.read_put(place_of_put)


async def test_a_step_is_skipped_where_too_many_bytes_would_wait(tmp_path: Path) -> None:
    engine = StorageEngine(max_bytes=None)
    for number in (1, 2, 3):
        await store(engine, number, LARGE)
    async with recording_to(directory(tmp_path), most_pending_bytes=2 * LARGE["x"].nbytes) as recorder:
        for number in (1, 2, 3):  # in one step of the loop: nothing is written meanwhile
            note(recorder, engine, number, [put_id(number)])
        assert not engine.puts[put_id(3)].values.is_pinned
    status = recorder.status()
    assert (status.recorded_step_count, status.skipped_step_count, status.is_recording) == (2, 1, True)
    await engine.close()


async def test_a_step_with_a_put_that_is_not_here_is_skipped(engine: StorageEngine, tmp_path: Path) -> None:
    await store(engine, 1, LARGE)
    async with recording_to(directory(tmp_path)) as recorder:
        note(recorder, engine, 0, [put_id(1), put_id(9)])
        note(recorder, engine, 1, [put_id(1)])
    status = recorder.status()
    assert (status.recorded_step_count, status.skipped_step_count) == (1, 1)
    assert not engine.puts[put_id(1)].values.is_pinned


class Dying(Directory):
    """Does so many calls, and then no other: its process was killed."""

    calls_left = 0

    async def _call(self) -> None:
        if self.calls_left == 0:
            raise RuntimeError("killed")
        self.calls_left -= 1

    async def write(self, name: str, parts: Sequence[Buffer]) -> None:
        await self._call()
        await super().write(name, parts)

    async def link(self, files: Sequence[tuple[str, Path, int]]) -> bool:
        await self._call()
        return await super().link(files)

    async def remove(self, names: Sequence[str]) -> None:
        await self._call()
        await super().remove(names)


async def test_a_kill_between_any_two_calls_leaves_whole_steps(engine: StorageEngine, tmp_path: Path) -> None:
    """Also of one that was begun after a kill, whose puts the recording has already."""
    for number in range(1, 6):
        await store(engine, number, LARGE if number % 2 else SMALL)
    steps = {0: (1, 2), 1: (2, 3), 2: (3, 4), 3: (1, 5)}
    was_cut = 0
    for calls in range(16):
        path = tmp_path / f"recording-{calls}"
        place = Dying(path, least_free_bytes=0)
        place.calls_left = calls
        async with recording_to(place, most_steps=2) as recorder:
            for index, numbers in steps.items():
                note(recorder, engine, index, [put_id(number) for number in numbers])
        was_cut += not recorder.status().is_recording
        async with recording_to(Directory(path, least_free_bytes=0)) as recorder:
            note(recorder, engine, 4, [put_id(number) for number in (1, 2, 3)])
        assert recorder.status().is_recording
        async with reading_from(Directory(path)) as recording:
            assert recording.damaged == {}
            assert recording.steps[-1].batch_index == 4
            for step in recording.steps:
                numbers = {**steps, 4: (1, 2, 3)}[step.batch_index]
                for number, place_of_put in zip(numbers, step.puts, strict=True):
                    expected = (LARGE if number % 2 else SMALL)["x"].ravel()
                    assert np.array_equal(values_of(place_of_put, await recording.read_put(place_of_put)), expected)
            names = {name for step in recording.steps for each in step.puts for name in each.names}
            assert {f"puts/{each.name}" for each in (path / "puts").iterdir()} == names
    assert was_cut > 5


async def test_one_service_writes_to_a_directory(tmp_path: Path) -> None:
    async with recording_to(directory(tmp_path)):
        with pytest.raises(DataDirError, match="another service is already recording to"):
            await Recorder(directory(tmp_path)).open()
    async with recording_to(directory(tmp_path)):
        pass


async def test_damage_is_told_and_not_served(engine: StorageEngine, tmp_path: Path) -> None:
    await store(engine, 1, LARGE)
    await store(engine, 2, {"x": np.arange(300_000.0)})
    async with recording_to(directory(tmp_path)) as recorder:
        note(recorder, engine, 0, [put_id(1)])
        note(recorder, engine, 1, [put_id(2)])
    first, second = sorted((tmp_path / "recording" / "steps").iterdir())
    puts = {path.stat().st_size: path for path in (tmp_path / "recording" / "puts").iterdir()}
    data = bytearray(puts[min(puts)].read_bytes())
    data[len(data) // 2] ^= 1
    puts[min(puts)].write_bytes(data)
    with puts[max(puts)].open("r+b") as file:
        file.truncate(1000)
    async with reading_from(directory(tmp_path)) as recording:
        for step, reason in zip(recording.steps, ("has the checksum", "The file was truncated"), strict=True):
            with pytest.raises(DataLossError, match=reason):
                await recording.read_put(step.puts[0])
    data = bytearray(first.read_bytes())
    data[-3] ^= 1
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-1])
    async with reading_from(directory(tmp_path)) as recording:
        assert recording.steps == []
        assert set(recording.damaged) == {f"steps/{path.name}" for path in (first, second)}
        with pytest.raises(NotFoundError, match="available: no steps; 2 steps are damaged"):
            recording.select(Asked(task_name="train"))


async def test_steps_that_nobody_wants_are_known_by_name_alone(engine: StorageEngine, tmp_path: Path) -> None:
    await store(engine, 1, SMALL)
    async with recording_to(directory(tmp_path)) as recorder:
        for index in range(3):
            note(recorder, engine, index, [put_id(1)])
    recording, asked = Recording(directory(tmp_path)), Asked(task_name="train", batch_index=1)
    await recording.open(asked)
    assert [len(step.puts) for step in recording.steps] == [0, 1, 0]
    assert recording.one(asked).batch_index == 1
    with pytest.raises(
        NotFoundError, match=r"does not contain step 7; available: 0 to 2 of task 'train' in partition 'train@0'$"
    ):
        recording.select(Asked(batch_index=7))
    with pytest.raises(InvalidArgumentError, match="task train matches 3 steps"):
        recording.one(Asked(task_name="train"))
    await recording.close()


async def test_objects_of_a_store_hold_a_recording(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    url = f"file://{tmp_path}/objects"
    engine = StorageEngine(max_bytes=None)
    await store(engine, 1, LARGE)
    await store(engine, 2, SMALL)
    async with recording_to(Objects(url), most_steps=1) as recorder:
        note(recorder, engine, 0, [put_id(1)])
        note(recorder, engine, 1, [put_id(1), put_id(2)])
        await written(recorder, 2)
    assert recorder.status().removed_step_count == 1
    async with recording_to(Objects(url)) as recorder:
        assert recorder.status().step_count == 1
    async with reading_from(Objects(url)) as recording:
        large, small = [values_of(place, await recording.read_put(place)) for place in recording.steps[0].puts]
    assert np.array_equal(large, LARGE["x"].ravel())
    assert np.array_equal(small, SMALL["x"])
    await engine.close()


async def test_a_put_larger_than_an_object_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("recording.recorder", "recording.reading"):
        monkeypatch.setattr(f"tq_service.{module}.LARGEST_OBJECT_BYTES", 1 << 20)
    cut = sys.modules["tq_service.recording.recorder"].cut
    monkeypatch.setattr("tq_service.recording.recorder.cut", lambda parts: cut(parts, 1 << 20))
    engine = StorageEngine(max_bytes=None)
    await store(engine, 1, LARGE)
    await store(engine, 2, SMALL)
    async with recording_to(directory(tmp_path)) as recorder:
        note(recorder, engine, 0, [put_id(2), put_id(1)])
    async with reading_from(directory(tmp_path)) as recording:
        small, large = recording.steps[0].puts
        assert len(large.names) == 2
        assert np.array_equal(values_of(large, await recording.read_put(large)), LARGE["x"].ravel())
        assert np.array_equal(values_of(small, await recording.read_put(small)), SMALL["x"])
    await engine.close()


async def test_other_directories_are_no_recordings(tmp_path: Path) -> None:
    with pytest.raises(DataDirError, match="is not a recording: its directory 'steps' is missing"):
        await Recording(Directory(tmp_path)).open()
    with pytest.raises(InvalidArgumentError, match="cannot list names"):
        place_of("valkey://localhost:1/0")
