"""Puts of asyncio clients whose call ends while they write: how it ended is said by its answer alone."""

import grpc
import pytest

from tq_service.dataplane.driver import AsyncPutCall
from tq_service.errors import UnavailableError
from tq_service.v1.storage_service_pb2 import PutHeader

LOST = "Internal error from Core"


def error(code, details):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class Stream:
    """A call that fails from one of its steps on."""

    def __init__(self, failing, failure):
        self.steps, self._failing, self._failure = [], failing, failure

    def _step(self, name):
        self.steps.append(name)
        if name in {self._failing, "answer"}:
            raise self._failure

    def add_done_callback(self, _):
        pass

    async def write(self, part):
        self._step("header" if isinstance(part, PutHeader) else "frame")

    async def initial_metadata(self):
        self._step("metadata")
        return grpc.aio.Metadata()

    async def done_writing(self):
        self._step("end")

    def __await__(self):
        self._step("answer")
        yield


@pytest.mark.parametrize("failing", ["header", "metadata", "frame", "end", "answer"])
@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (error(grpc.StatusCode.INTERNAL, LOST), UnavailableError),
        (error(grpc.StatusCode.INTERNAL, "a fault of the service"), grpc.aio.AioRpcError),
        (error(grpc.StatusCode.RESOURCE_EXHAUSTED, "no capacity"), grpc.aio.AioRpcError),
    ],
)
async def test_a_call_that_fails_in_any_step_ends_as_its_answer_says(failing, failure, expected):
    stream = Stream(failing, failure)
    call = AsyncPutCall(lambda **_: stream, 5.0, None)
    await call.start(PutHeader())
    await call.send([b"one", b"two"])
    with pytest.raises(expected) as caught:
        await call.answer()
    assert caught.value is failure or expected is UnavailableError
    assert stream.steps[-1] == "answer"
