"""Stands between a client and a service, and keeps what the client sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

_CENTURY_SECONDS = 3e9


class RecordingProxy(grpc.GenericRpcHandler):
    """Passes all calls on; `calls` has the messages of each, by method."""

    def __init__(self, target: str) -> None:
        self.calls: dict[str, list[list[bytes]]] = defaultdict(list)
        self._channel = grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
        self._server = grpc.server(ThreadPoolExecutor(8), handlers=[self])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> RecordingProxy:
        self._server.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.stop(None).wait()
        self._channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of any method."""
        method = handler_call_details.method

        def forward(sent: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            messages: list[bytes] = []
            self.calls[method.rpartition("/")[2]].append(messages)

            def recorded() -> Iterator[bytes]:
                for message in sent:
                    messages.append(message)
                    yield message

            remaining = context.time_remaining()
            # A call without a deadline has one in centuries, which gRPC takes for one long past.
            timeout = None if remaining is None or remaining > _CENTURY_SECONDS else remaining
            call = self._channel.stream_stream(method)(recorded(), timeout=timeout)
            context.send_initial_metadata(call.initial_metadata())
            try:
                yield from call
            except grpc.RpcError:
                context.set_trailing_metadata(call.trailing_metadata())
                context.abort(call.code(), call.details())

        return grpc.stream_stream_rpc_method_handler(forward)
