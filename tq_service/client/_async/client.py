"""The client: all calls of the service, for producers and consumers."""

from __future__ import annotations

from tq_service.client._async.partitions import AsyncPartitionCalls
from tq_service.client._async.policies import AsyncPolicyCalls
from tq_service.client._async.watching import AsyncWatchCalls
from tq_service.client._async.work import AsyncWorkCalls


class AsyncClient(AsyncPartitionCalls, AsyncWorkCalls, AsyncPolicyCalls, AsyncWatchCalls):
    """A client of the service at one address. Use it in a `with` block, or close it.

    Every call has a deadline of `timeout` seconds (`get_meta`: beyond its `max_wait`). While the service is
    unavailable, calls are retried with back-off under one request id, and a warning is logged if that lasts: a client
    may start before its service. Errors derive from `TqError`, see docs/errors.md. A pickled client holds its address,
    timeout and any paths it was given. A token given as text is not pickled; the client takes it from the environment
    when it is unpickled.

    The blocking client is for threads. It opens channels on first use, and new ones after a fork. The asyncio client
    may be used by several event loops of a process, even at the same time in several threads. Each loop has separate
    channels; closing it in any of them closes all, and those of a closed loop are dropped. In a process forked from one
    that has used an asyncio client it raises PreconditionError: start processes by spawn.

    Args:
        address: "host:port", or a host alone for port 50051; None: the environment variable TQ_ADDRESS, else
            localhost:50051. Invalid addresses raise InvalidArgumentError. For a cluster of controllers pass their
            addresses, as a list or separated by commas, or one DNS name of all: the client finds the leader and its
            successors.
        timeout: default deadline of the calls, in seconds.
        token: the bearer token, or the path of a file that holds it and is read again when it changes; None:
            `TQ_TOKEN`, else the file named by `TQ_TOKEN_FILE`, else none; False: none, regardless of both variables.
        tls: TLS settings; None: from `TQ_TLS_CA`, `TQ_TLS_CERT` and `TQ_TLS_KEY` if set, else plaintext; False:
            plaintext, regardless of these variables.
        namespace: prefix of its partition names on the service, before a "/". Programs of one run share a namespace,
            such as "run-7", which keeps the "train" of one run distinct from that of another. Tokens and quotas apply
            to the full names: "run-7/train". None: `TQ_NAMESPACE`, else none. False: none, regardless of the variable:
            partitions of all namespaces then appear with their full names. A batch from another namespace keeps
            referring to its partition there.
        gathers_puts: whether small puts and inserts that wait at the same moment, in one event loop or in threads that
            share the client, are sent in one call. Each caller gets the same answer or error as from a separate call.
            False: each is sent separately.
        insecure: whether the token may be sent in plaintext to other machines, which otherwise raises
            InvalidArgumentError; None: whether `TQ_INSECURE` is true.
    """
