"""Fixtures for tests that talk to a real server."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack

import fork_server
import property_settings  # noqa: F401  (its profiles are known before hypothesis looks for one)
import pytest
from live_server import AnyClient, ClientKind, LiveServer, LoopThread, StartServer

from tq_service.server import process

# Threads of torch wait for each other in loops: on busy cores that takes minutes. Read when torch is imported, also by
# the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

fork_server.install()

gc.disable()  # while thousands of tests are collected, which all stay: a fifth of the processor time


def pytest_collection_finish() -> None:
    """Let the garbage collector run from now on, without the objects of the tests: walking over them takes a second."""
    gc.freeze()
    gc.enable()
    # Each server asks whether objects are frozen, which would count two million each time: a quarter of `make test`.
    process.has_frozen_objects = functools.cache(process.has_frozen_objects)


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    """The loop of all servers and async clients of this process."""
    thread = LoopThread()
    yield thread
    thread.stop()


@pytest.fixture
def start_server(loop_thread: LoopThread) -> Iterator[StartServer]:
    """Start servers with settings of their own."""
    with ExitStack() as stack:
        yield lambda **flags: stack.enter_context(LiveServer(loop_thread, **flags))


@pytest.fixture
def server(start_server: StartServer) -> LiveServer:
    """A server with default settings."""
    return start_server()


@pytest.fixture(params=[pytest.param("sync", marks=pytest.mark.nightly), "async"])
def client_kind(request: pytest.FixtureRequest) -> ClientKind:
    """Each test runs with the async client; with the sync one, which is generated from it, in `make nightly`.

    The tests of `tests/client` always use both.
    """
    kind: ClientKind = request.param
    return kind


@pytest.fixture
def client(client_kind: ClientKind, server: LiveServer) -> AnyClient:
    """A client of `server`, of either kind."""
    return server.client(client_kind)
