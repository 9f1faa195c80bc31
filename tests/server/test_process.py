"""How a process that serves is tuned, whoever runs the server, and that it is as before once it has ended."""

import asyncio
import gc
import platform
import resource
import socket
import sys
import weakref
from collections.abc import Iterator

import pytest

from tq_service.config import ServeSettings
from tq_service.errors import InvalidArgumentError
from tq_service.server import process
from tq_service.server.app import running
from tq_service.server.process import collect_garbage, keep_freed_memory, loop_factory, tuned_process


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is of glibc")
def test_malloc_accepts_the_settings() -> None:
    keep_freed_memory.cache_clear()
    assert keep_freed_memory()


def test_memory_stays_as_it_is_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_freed_memory.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", lambda _name: object())
    assert not keep_freed_memory()
    keep_freed_memory.cache_clear()


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    """A server leaves objects as they are in a process that froze some, as `conftest.py` does."""
    gc.unfreeze()
    process.has_frozen_objects.cache_clear()  # see `conftest.py`
    yield
    gc.freeze()
    process.has_frozen_objects.cache_clear()  # see `conftest.py`


def tuning() -> tuple[object, ...]:
    return gc.get_threshold(), gc.get_freeze_count() > 0, sys.getswitchinterval()


def test_a_process_is_tuned_until_the_last_server_ends() -> None:
    before = tuning()
    assert before[1:] == (False, pytest.approx(0.005))
    first, second = tuned_process(), tuned_process()
    first.__enter__()
    tuned = tuning()
    assert tuned[1:] == (True, pytest.approx(0.0005))
    assert all(now >= then for now, then in zip(gc.get_threshold(), before[0], strict=True))  # type: ignore[call-overload]
    second.__enter__()
    first.__exit__(None, None, None)
    assert tuning() == tuned
    second.__exit__(None, None, None)
    assert tuning() == before


def test_what_the_program_around_it_has_frozen_stays_so() -> None:
    gc.freeze()
    process.has_frozen_objects.cache_clear()  # see `conftest.py`
    try:
        with tuned_process():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


async def test_an_embedded_server_is_tuned_too() -> None:
    before = tuning()
    async with running(ServeSettings(host="127.0.0.1", port=0, shared_memory="off")):
        assert tuning() != before
    assert tuning() == before


async def test_a_server_that_cannot_start_leaves_the_process_as_it_was() -> None:
    before = tuning()
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="another process listens on this address"),
    ):
        async with running(ServeSettings(host="127.0.0.1", port=taken.getsockname()[1])):
            raise AssertionError("it started")
    assert tuning() == before


@pytest.mark.parametrize("generation", [0, 1, 2])
async def test_garbage_goes_though_nothing_is_allocated(generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_YOUNG_COLLECTION_SECONDS", 0.01)
    monkeypatch.setattr(process, "_FULL_COLLECTION_SECONDS", 0.1)
    was_enabled, gone = gc.isenabled(), asyncio.Event()
    gc.disable()
    cycle = type("Cycle", (), {})()
    cycle.itself, reference = cycle, weakref.ref(cycle, lambda _: gone.set())
    for younger in range(generation):
        gc.collect(younger)  # what is alive then is older afterwards
    del cycle
    collecting = asyncio.create_task(collect_garbage())
    try:
        await gone.wait()
        assert reference() is None
    finally:
        collecting.cancel()
        if was_enabled:
            gc.enable()


def test_event_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loop_factory("off") is None
    uvloop = pytest.importorskip("uvloop")
    assert loop_factory("auto") is loop_factory("on") is uvloop.new_event_loop
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop_factory("auto") is None
    with pytest.raises(InvalidArgumentError, match="uvloop is on but not installed"):
        loop_factory("on")
    with asyncio.Runner(loop_factory=loop_factory("auto")) as runner:
        assert runner.run(asyncio.sleep(0, "ran")) == "ran"


def test_a_server_raises_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1024), hard))
        with tuned_process():
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 1 << 20), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
