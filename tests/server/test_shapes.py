"""What calls pass, for every shape a method may have: the same, and nobody reaches a handler past it."""

import asyncio
import itertools
import logging

import grpc
import pytest
from google.protobuf.message import DecodeError

from tq_service.errors import DiskFullError, PartitionNotFoundError
from tq_service.server.audit import LOGGER_NAME, Audit
from tq_service.server.credential_files import TokenFile, append_token, digest_of, make_token
from tq_service.server.rpc.calls import AccessControl, DurableAnswers, RunningCalls, Services
from tq_service.server.rpc.methods import Method, Middleware, shown_partitions
from tq_service.v1 import controller_service_pb2 as pb

# Request and response: one message or a stream of them; and how a handler that streams its answers is written.
SHAPES = [
    ("unary", "unary", "coroutine"),
    ("stream", "unary", "coroutine"),
    ("unary", "stream", "coroutine"),
    ("unary", "stream", "generator"),
    ("stream", "stream", "coroutine"),
    ("stream", "stream", "generator"),
]
CODE = grpc.StatusCode
SERVICE = "tq_service.test.Shapes"
TOKENS = {
    "may": (["read"], ("mine/",)),
    "role": (["produce"], ("mine/",)),
    "prefix": (["read"], ("yours/",)),
    "anything": (["admin"], ("",)),
}
pytestmark = pytest.mark.parametrize("shape", SHAPES, ids="-".join)


async def _all(requests):
    if isinstance(requests, bytes):
        return [requests]
    return [request async for request in requests]


def _behavior(shape, entered):
    """Return a handler that answers with its requests, and notes each call; a request may make it fail."""
    _, response, kind = shape

    def noted(requests):
        entered.append(requests)
        if b"fail" in requests:
            raise RuntimeError("a secret of the service")
        if b"mine/absent" in requests:
            raise PartitionNotFoundError("did you mean 'yours/train'?")
        return requests

    async def one(request, context):
        return b" ".join(noted(await _all(request)))

    async def written(request, context):
        for each in noted(await _all(request)):
            await context.write(each)

    async def generated(request, context):
        for each in noted(await _all(request)):
            yield each

    if response == "unary":
        return one
    return generated if kind == "generator" else written


def _listing(shape):
    """Return a handler whose answers each list those of two partitions that its caller may know."""
    _, response, kind = shape

    def listed():
        names = filter(shown_partitions.get(), ("mine/a", "yours/b"))
        return pb.ListPartitionsResponse(partitions=[{"partition_id": name} for name in names])

    async def one(request, context):
        return listed()

    async def written(request, context):
        await context.write(listed())

    async def generated(request, context):
        yield listed()

    if response == "unary":
        return one
    return generated if kind == "generator" else written


def _decode(data):
    if data == b"garbage":
        raise DecodeError("that is none")
    return data


def _encode(answer):
    return answer if isinstance(answer, bytes) else " ".join(each.partition_id for each in answer.partitions).encode()


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, handlers):
        self._handlers = handlers

    def service(self, details):
        return self._handlers.get(details.method)


class Disk:
    """A journal that is durable when the test says so."""

    def __init__(self):
        self.is_failing = self.is_disk_low = self.has_unflushed = False
        self.waiting_count = 0
        self.is_durable = asyncio.Event()

    async def wait_durable(self):
        self.waiting_count += 1
        await self.is_durable.wait()
        if self.is_failing:
            raise DiskFullError("full", retry_after_seconds=1.0)
        self.has_unflushed = False


class Ends(Middleware):
    """How calls end: what an access log or metrics would be made of."""

    def __init__(self):
        self.seen = []

    def wrap(self, method, caller, behavior):
        async def call(request, context):
            try:
                answer = await behavior(request, context)
            except grpc.aio.AbortError:
                code = context.code()
                self.seen.append((method.short_name, caller.name, code if isinstance(code, int) else code.value[0]))
                raise
            self.seen.append((method.short_name, caller.name, CODE.OK.value[0]))
            return answer

        return call


class Served:
    """Methods of one shape behind the middleware: `Ruled`, `Listed` and `Puts` have a rule, `Unruled` has none."""

    def __init__(self, shape, path):
        self._shape = shape
        self.entered = []
        self.disk, self.ends, self.calls = Disk(), Ends(), RunningCalls(40)
        access = AccessControl(Audit(), TokenFile(path))
        access.partition_of = {b"p": "mine/a", b"q": "yours/a"}.get
        self.middleware = [
            self.ends,
            self.calls,
            access,
            DurableAnswers(self.disk),
        ]

    async def start(self):
        request, response, _ = self._shape
        shape = f"{request}_{response}"
        about = {"has_request_stream": request == "stream", "has_response_stream": response == "stream"}
        about["roles"] = frozenset({"read"})
        methods = [
            Method(name=f"/{SERVICE}/Ruled", partitions=lambda first: (first.decode(),), fills_disk=True, **about),
            Method(name=f"/{SERVICE}/Listed", **about),
            Method(
                name=f"/{SERVICE}/Puts",
                partitions=lambda first: (first.decode().partition(" ")[0],),
                put_ids=lambda first: first.split(b" ")[1:],
                **about,
            ),
        ]
        make = getattr(grpc, f"{shape}_rpc_method_handler")
        handlers = {
            f"/{SERVICE}/{name}": make(behavior, _decode, _encode)
            for name, behavior in (
                ("Ruled", _behavior(self._shape, self.entered)),
                ("Unruled", _behavior(self._shape, self.entered)),
                ("Puts", _behavior(self._shape, self.entered)),
                ("Listed", _listing(self._shape)),
            )
        }
        self._server = grpc.aio.server()
        services = Services(self._server, self.middleware, {method.name: method for method in methods})
        services.add_generic_rpc_handlers([_Handlers(handlers)])
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")

    async def stop(self):
        self._channel.close()
        await self._server.stop(None)

    async def call(self, name, *, token, partition="mine/train", then="more"):
        """Return the answers, or the error."""
        return await asyncio.to_thread(self._call, name, token, partition, then)

    def _call(self, name, token, partition, then):
        # From a thread: a call of grpc.aio that is refused while it still writes may end by another status.
        request, response, _ = self._shape
        method = getattr(self._channel, f"{request}_{response}")(f"/{SERVICE}/{name}")
        parts = [partition.encode(), then.encode()]
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        try:
            answer = method(iter(parts) if request == "stream" else parts[0], metadata=metadata, timeout=60)
            return [answer] if response == "unary" else list(answer)
        except grpc.RpcError as error:
            return error

    async def code(self, *args, **kwargs):
        """Return the status of the error of a call."""
        return (await self.call(*args, **kwargs)).code()

    def answers(self, *requests):
        """Return what the handler answers to requests."""
        sent = [request.encode() for request in requests][: 2 if self._shape[0] == "stream" else 1]
        return sent if self._shape[1] == "stream" else [b" ".join(sent)]


@pytest.fixture
async def served(shape, tmp_path):
    path = tmp_path / "tokens.toml"
    for name, (roles, prefixes) in TOKENS.items():
        append_token(path, make_token(name=name, sha256=digest_of(name), roles=roles, prefixes=prefixes))
    served = Served(shape, path)
    await served.start()
    yield served
    await served.stop()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  (the calls are made by threads)
            await asyncio.sleep(0.001)


async def test_who_may_call_it_gets_the_answers(served):
    assert await served.call("Ruled", token="may") == served.answers("mine/train", "more")
    assert len(served.entered) == 1
    assert await served.call("Ruled", token="anything", partition="yours/train") != []
    assert len(served.entered) == 2


@pytest.mark.parametrize(
    ("token", "partition", "code"),
    [
        (None, "mine/train", CODE.UNAUTHENTICATED),
        ("unknown", "mine/train", CODE.UNAUTHENTICATED),
        ("role", "mine/train", CODE.PERMISSION_DENIED),
        ("prefix", "mine/train", CODE.PERMISSION_DENIED),
        ("may", "yours/train", CODE.PERMISSION_DENIED),
    ],
)
async def test_who_may_not_never_reaches_the_handler(served, token, partition, code, caplog):
    with caplog.at_level(logging.INFO, LOGGER_NAME):
        assert await served.code("Ruled", token=token, partition=partition) is code
    assert not served.entered
    assert len([record for record in caplog.records if record.name == LOGGER_NAME]) == 1


@pytest.mark.parametrize(
    ("named", "is_let_in"),
    [("mine/a", True), ("mine/a p", True), ("mine/a p gone", True), ("mine/a p q", False), ("yours/a p", False)],
)
async def test_partitions_of_puts_count_as_named(served, named, is_let_in):
    answer = await served.call("Puts", token="may", partition=named)
    assert isinstance(answer, list) == is_let_in
    assert is_let_in or answer.code() is CODE.PERMISSION_DENIED
    assert await served.call("Puts", token="anything", partition=named) == served.answers(named, "more")


@pytest.mark.parametrize("token", TOKENS)
async def test_a_method_without_a_rule_is_for_nobody(served, token):
    assert await served.code("Unruled", token=token) is CODE.PERMISSION_DENIED
    assert not served.entered


async def test_many_calls_at_once_each_have_their_own_answer(served):
    tokens = list(itertools.islice(itertools.cycle(["may", "role", "prefix"]), 30))
    answers = await asyncio.gather(*(served.call("Ruled", token=token) for token in tokens))
    for token, answer in zip(tokens, answers, strict=True):
        assert isinstance(answer, grpc.RpcError) == (token != "may")
        assert isinstance(answer, list) or answer.code() is CODE.PERMISSION_DENIED
    assert len(served.entered) == 10
    assert served.calls.count == 0


async def test_lists_show_only_what_a_token_is_for(served):
    assert await served.call("Listed", token="may") == [b"mine/a"]
    assert await served.call("Listed", token="anything") == [b"mine/a yours/b"]


async def test_a_fault_of_the_service_is_said_to_be_one_and_no_more(served, caplog):
    error = await served.call("Ruled", token="anything", partition="fail")
    assert error.code() is CODE.INTERNAL
    assert "secret" not in error.details()
    (record,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    assert record.getMessage() == f"a call failed method=/{SERVICE}/Ruled"
    assert "a secret of the service" in str(record.exc_info)


async def test_errors_name_no_partitions_of_others(served):
    for token, is_named in (("anything", True), ("may", False)):
        error = await served.call("Ruled", token=token, partition="mine/absent")
        assert (error.code(), "yours/train" in error.details()) == (CODE.NOT_FOUND, is_named)


@pytest.mark.parametrize("token", ["may", "anything"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(served, shape, token):
    places = [{"partition": "garbage"}]
    if shape[0] == "stream":
        places.append({"then": "garbage"})
    for place in places:
        error = await served.call("Ruled", token=token, **place)
        assert error.code() is CODE.INVALID_ARGUMENT
        assert "cannot be read" in error.details()
    assert not served.entered


async def test_one_call_too_many_is_refused_whoever_makes_it(served):
    served.calls._most = 0
    for token in ("may", None):
        error = await served.call("Ruled", token=token)
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert "max_calls" in error.details()
    assert not served.entered
    assert served.calls.rejected == {"max_calls": 2}
    assert served.calls.count == 0


@pytest.mark.parametrize("partition", ["mine/train", "fail"])
async def test_no_answer_and_no_error_goes_before_it_is_durable(served, partition):
    served.disk.has_unflushed = True
    calling = asyncio.ensure_future(served.call("Ruled", token="anything", partition=partition))
    await until(lambda: served.disk.waiting_count)
    assert not served.ends.seen
    assert not calling.done()
    served.disk.is_durable.set()
    answer = await calling
    assert answer.code() is CODE.INTERNAL if partition == "fail" else answer == served.answers("mine/train", "more")


async def test_while_nothing_can_be_written_down_nothing_is_done(served):
    served.disk.is_failing = True
    served.disk.is_durable.set()
    assert await served.code("Ruled", token="may") is CODE.RESOURCE_EXHAUSTED
    served.disk.is_failing, served.disk.is_disk_low = False, True
    assert await served.code("Ruled", token="may") is CODE.RESOURCE_EXHAUSTED
    assert not served.entered
    assert await served.code("Ruled", token="prefix") is CODE.PERMISSION_DENIED  # and learns nothing of the disk
    assert await served.call("Listed", token="may") == [b"mine/a"]


async def test_one_more_middleware_sees_every_call_and_how_it_ends(served):
    for token in ("may", "role", "unknown"):
        await served.call("Ruled", token=token)
    await served.call("Unruled", token="may")
    await served.call("Ruled", token="anything", partition="fail")
    served.calls._most = 0
    await served.call("Ruled", token="may")
    await until(lambda: len(served.ends.seen) == 6)
    assert served.ends.seen == [
        ("Ruled", "may", CODE.OK.value[0]),
        ("Ruled", "role", CODE.PERMISSION_DENIED.value[0]),
        ("Ruled", "", CODE.UNAUTHENTICATED.value[0]),
        ("Unruled", "may", CODE.PERMISSION_DENIED.value[0]),
        ("Ruled", "anything", CODE.INTERNAL.value[0]),
        ("Ruled", "", CODE.RESOURCE_EXHAUSTED.value[0]),
    ]
