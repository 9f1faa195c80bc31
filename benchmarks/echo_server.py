"""A `grpc.aio` server that only answers: the minimum cost of a unary call in Python.

The first four bytes of a request are the size of the answer (little-endian).
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import grpc

from benchmarks.harness import run_async

METHOD = "/benchmarks.Echo/Call"
_SERVICE, _NAME = METHOD.strip("/").split("/")


def request_of(size: int, answer_size: int) -> bytes:
    """Return a request of `size` bytes that is answered by `answer_size` bytes."""
    return answer_size.to_bytes(4, "little") + os.urandom(max(size - 4, 0))


def echo_call(channel: grpc.aio.Channel) -> Any:
    """Return the call on a channel; it takes and returns bytes."""
    return channel.unary_unary(METHOD)


async def _answer(request: bytes, context: object) -> bytes:
    return bytes(int.from_bytes(request[:4], "little"))


async def _serve() -> None:
    server = grpc.aio.server()
    handlers = {_NAME: grpc.unary_unary_rpc_method_handler(_answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await server.stop(None)


if __name__ == "__main__":
    run_async(_serve())
