"""One service for all tests, in a process of its own, and a namespace for each test."""

import asyncio
import inspect
import itertools

import pytest
import transfer_queue as tq

from tq_service.testing import ServiceProcess

_numbers = itertools.count()


@pytest.fixture(scope="session")
def service(tmp_path_factory):
    with ServiceProcess("--checkpoint-dir", str(tmp_path_factory.mktemp("checkpoints"))) as running:
        yield running.address


@pytest.fixture
def conf(service):
    return {"controller": {"address": service, "namespace": f"test-{next(_numbers)}", "polling_mode": True}}


@pytest.fixture
def run(conf):
    tq.init(conf)
    yield
    tq.close()


class Forms:
    """The functions or the client's methods, sync or async; each async call has an event loop of its own."""

    def __init__(self, owner, prefix):
        self._owner = owner
        self._prefix = prefix

    def __getattr__(self, name):
        function = getattr(self._owner, self._prefix + name)

        def call(*arguments, **keywords):
            answer = function(*arguments, **keywords)
            return asyncio.run(answer) if inspect.iscoroutine(answer) else answer

        return call


@pytest.fixture(params=["", "async_"], ids=["sync", "async"])
def kv(request, run):
    return Forms(tq, request.param)


@pytest.fixture(params=["", "async_"], ids=["sync", "async"])
def client(request, run):
    return Forms(tq.get_client(), request.param)
