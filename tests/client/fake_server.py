"""A service whose answers a test scripts: for faults that a real one does not have on demand."""

import asyncio
import contextlib

import grpc

from tq_service import errors
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.v1 import storage_service_pb2
from tq_service.v1.controller_service_pb2_grpc import ControllerServiceServicer, add_ControllerServiceServicer_to_server
from tq_service.v1.storage_service_pb2_grpc import StorageServiceServicer, add_StorageServiceServicer_to_server
from tq_service.wire.columns import SEND_AS_KEY
from tq_service.wire.error_table import STATUS_TRAILER, code_of, to_status


async def abort_with(context, error):
    status = to_status(error)
    context.set_trailing_metadata(((STATUS_TRAILER, status.SerializeToString()),))
    await context.abort(code_of(error), status.message)


class Script:
    """Answers one call after the other; the last answer again and again. An exception is raised as an error."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        self.entered = asyncio.Event()

    async def answer(self, request, context):
        self.requests.append(type(request).FromString(request.SerializeToString()))
        self.entered.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            answer = self.answers[-1]
        if isinstance(answer, errors.TqError):
            await abort_with(context, answer)
        return answer


class FakeController(ControllerServiceServicer):
    """Scripts by the name of the call."""

    def __init__(self, **scripts):
        for name, script in scripts.items():
            setattr(self, name, script.answer)


class FakeStorage(StorageServiceServicer):
    """Takes puts after refusing the first ones, and streams scripted answers of gets."""

    def __init__(self, put_failures=(), put_answer=None, get_answers=None):
        self.put_failures = list(put_failures)
        self.put_answer = put_answer or storage_service_pb2.PutResponse()
        self.get_answers = get_answers or []
        self.put_headers = []
        self.put_sizes = []
        self.whole_put_count = 0
        self.get_requests = []
        self.inline_get_requests = []
        # By default everything is too large.
        self.inline_get_answer = storage_service_pb2.GetInlineResponse(size_bytes=1 << 40)

    async def Put(self, request_iterator, context):  # noqa: N802  (the name of the rpc)
        size = 0
        async for part in request_iterator:
            if part.HasField("header"):
                self.put_headers.append(part.header)
                await context.send_initial_metadata(((SEND_AS_KEY, "reserved"),))
            size += len(part.frame)
            if self.put_failures and size:
                await abort_with(context, self.put_failures.pop(0))
        self.put_sizes.append(size)
        return self.put_answer

    async def PutInline(self, request, context):  # noqa: N802  (the name of the rpc)
        self.whole_put_count += 1
        self.put_headers.append(request.header)
        if self.put_failures and (failure := self.put_failures.pop(0)) is not None:
            await abort_with(context, failure)
        self.put_sizes.append(len(request.values))
        return storage_service_pb2.PutInlineResponse(put=self.put_answer)

    async def Get(self, request, context):  # noqa: N802  (the name of the rpc)
        self.get_requests.append(request)
        answer = self.get_answers.pop(0) if len(self.get_answers) > 1 else self.get_answers[0]
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        if isinstance(answer, errors.TqError):
            await abort_with(context, answer)
        for part in answer:
            yield part

    async def GetInline(self, request, context):  # noqa: N802  (the name of the rpc)
        self.inline_get_requests.append(request)
        return self.inline_get_answer


@contextlib.asynccontextmanager
async def serving(controller=None, storage=None, port=0, options=(), host="127.0.0.1"):
    """Yield the address of a server with these servicers."""
    server = grpc.aio.server(options=options)
    if controller is not None:
        add_ControllerServiceServicer_to_server(controller, server)
    if storage is not None:
        add_StorageServiceServicer_to_server(storage, server)
    port = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    try:
        yield f"{host}:{port}"
    finally:
        await server.stop(0)


__all__ = ["FakeController", "FakeStorage", "Script", "abort_with", "pb", "serving"]
