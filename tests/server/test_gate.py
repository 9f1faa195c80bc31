"""What tokens allow, for every shape a method may have: whoever may not call it never reaches its handler."""

import asyncio
import itertools
import logging

import grpc
import pytest

from tq_service.server.audit import LOGGER_NAME, Audit
from tq_service.server.call_limits import RunningCalls
from tq_service.server.door import Door
from tq_service.server.error_boundary import ErrorBoundary
from tq_service.server.permissions import Rule
from tq_service.server.tokens import Token, TokenFile, append_token, digest_of

# Request and response: one message or a stream of them; and how a handler that streams its answers is written.
SHAPES = [
    ("unary", "unary", "coroutine"),
    ("stream", "unary", "coroutine"),
    ("unary", "stream", "coroutine"),
    ("unary", "stream", "generator"),
    ("stream", "stream", "coroutine"),
    ("stream", "stream", "generator"),
]
SERVICE = "tq_service.test.Shapes"
TOKENS = {
    "may": (["read"], ("mine/",)),
    "role": (["produce"], ("mine/",)),
    "prefix": (["read"], ("yours/",)),
    "anything": (["admin"], ("",)),
}
_HANDLERS = {
    ("unary", "unary"): grpc.unary_unary_rpc_method_handler,
    ("stream", "unary"): grpc.stream_unary_rpc_method_handler,
    ("unary", "stream"): grpc.unary_stream_rpc_method_handler,
    ("stream", "stream"): grpc.stream_stream_rpc_method_handler,
}
pytestmark = pytest.mark.parametrize("shape", SHAPES, ids="-".join)


async def _all(requests):
    if isinstance(requests, bytes):
        return [requests]
    return [request async for request in requests]


def _behavior(shape, entered):
    """Return a handler that answers with its requests, and takes note of each call."""
    _, response, kind = shape

    async def one(request, context):
        entered.append(request)
        return b" ".join(await _all(request))

    async def written(request, context):
        entered.append(request)
        for each in await _all(request):
            await context.write(each)

    async def generated(request, context):
        entered.append(request)
        for each in await _all(request):
            yield each

    if response == "unary":
        return one
    return generated if kind == "generator" else written


class _Services(grpc.GenericRpcHandler):
    def __init__(self, handlers):
        self._handlers = handlers

    def service(self, details):
        return self._handlers.get(details.method)


class Served:
    """A method of one shape behind the checks: `Ruled` has a rule, `Unruled` has none."""

    def __init__(self, shape, channel, entered):
        self._shape = shape
        self._channel = channel
        self.entered = entered

    async def call(self, name, *, token, partition="mine/train"):
        """Return the answers, or the status of the error."""
        return await asyncio.to_thread(self._call, name, token, partition)

    def _call(self, name, token, partition):
        # From a thread: a call of grpc.aio that is refused while it still writes may end by another status.
        request, response, _ = self._shape
        method = getattr(self._channel, f"{request}_{response}")(f"/{SERVICE}/{name}")
        parts = [partition.encode(), b"more"][: 2 if request == "stream" else 1]
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        try:
            answer = method(iter(parts) if request == "stream" else parts[0], metadata=metadata, timeout=60)
            return [answer] if response == "unary" else list(answer)
        except grpc.RpcError as error:
            return error.code()


@pytest.fixture
async def served(shape, tmp_path):
    path, entered = tmp_path / "tokens.toml", []
    for name, (roles, prefixes) in TOKENS.items():
        append_token(path, Token.checked(name=name, digest=digest_of(name), roles=roles, prefixes=prefixes))
    rule = Rule(roles=frozenset({"read"}), partitions=lambda first: (first.decode(),))
    server = grpc.aio.server()
    boundary = ErrorBoundary(server, RunningCalls())
    boundary.door = Door({f"/{SERVICE}/Ruled": rule}, Audit(), TokenFile(path))
    handler = _HANDLERS[shape[:2]](_behavior(shape, entered))
    names = [f"/{SERVICE}/{name}" for name in ("Ruled", "Unruled")]
    boundary.add_generic_rpc_handlers([_Services(dict.fromkeys(names, handler))])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(shape, channel, entered)
    await server.stop(None)


async def test_who_may_call_it_gets_the_answers(served, shape):
    answers = await served.call("Ruled", token="may")
    both = [b"mine/train", b"more"][: 2 if shape[0] == "stream" else 1]
    assert answers == (both if shape[1] == "stream" else [b" ".join(both)])
    assert len(served.entered) == 1
    assert await served.call("Ruled", token="anything", partition="yours/train") != []
    assert len(served.entered) == 2


@pytest.mark.parametrize(
    ("token", "partition", "code"),
    [
        (None, "mine/train", grpc.StatusCode.UNAUTHENTICATED),
        ("unknown", "mine/train", grpc.StatusCode.UNAUTHENTICATED),
        ("role", "mine/train", grpc.StatusCode.PERMISSION_DENIED),
        ("prefix", "mine/train", grpc.StatusCode.PERMISSION_DENIED),
        ("may", "yours/train", grpc.StatusCode.PERMISSION_DENIED),
    ],
)
async def test_who_may_not_never_reaches_the_handler(served, token, partition, code, caplog):
    with caplog.at_level(logging.INFO, LOGGER_NAME):
        assert await served.call("Ruled", token=token, partition=partition) is code
    assert not served.entered
    assert len([record for record in caplog.records if record.name == LOGGER_NAME]) == 1


@pytest.mark.parametrize("token", TOKENS)
async def test_a_method_without_a_rule_is_for_nobody(served, token):
    assert await served.call("Unruled", token=token) is grpc.StatusCode.PERMISSION_DENIED
    assert not served.entered


async def test_many_calls_at_once_each_have_their_own_answer(served, shape):
    tokens = list(itertools.islice(itertools.cycle(["may", "role", "prefix"]), 30))
    answers = await asyncio.gather(*(served.call("Ruled", token=token) for token in tokens))
    for token, answer in zip(tokens, answers, strict=True):
        assert (answer is grpc.StatusCode.PERMISSION_DENIED) == (token != "may")
    assert len(served.entered) == 10
