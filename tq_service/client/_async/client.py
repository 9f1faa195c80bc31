"""The client, which provides all calls to the service for producers and consumers."""

from __future__ import annotations

from tq_service.client._async.partitions import AsyncPartitionCalls
from tq_service.client._async.policies import AsyncPolicyCalls
from tq_service.client._async.watching import AsyncWatchCalls
from tq_service.client._async.work import AsyncWorkCalls


class AsyncClient(AsyncPartitionCalls, AsyncWorkCalls, AsyncPolicyCalls, AsyncWatchCalls):
    """A client of one service or cluster. Use it in a `with` block, or close it.

    Every call has a deadline of `timeout` seconds; for `claim`, these seconds are added to its `max_wait`. While the
    service is unavailable, calls are retried with back-off under the same request id, so a client may start before its
    service. A warning is logged if the service remains unavailable. All errors derive from `TqError`; see
    docs/errors.md. A pickled client contains its address, its timeout and any paths passed to it. A token passed as
    text is not pickled: the unpickled client reads its token from the environment.

    The blocking client is for threads; it opens its channels on first use, and new ones after a fork. Several event
    loops of a process may share an asyncio client, even in different threads at the same time. Each loop has separate
    channels, which are dropped when the loop is closed. Closing the client in one loop closes it in all loops. In a
    process forked after its parent used an asyncio client, the client raises PreconditionError. Start such processes by
    spawn.

    Args:
        address: "host:port", or a host alone for port 50051. None: the environment variable TQ_ADDRESS, else
            localhost:50051. Invalid addresses raise InvalidArgumentError. For a cluster of controllers, pass all
            addresses, as a list or separated by commas, or one DNS name that resolves to all of them. The client then
            finds the leader, and the new leader after a change.
        timeout: default timeout of calls, in seconds.
        token: the bearer token, or the path of a file that contains it, which is read again whenever it changes. None:
            the value of `TQ_TOKEN`, else the file named by `TQ_TOKEN_FILE`, else no token. False: no token, regardless
            of these variables.
        tls: TLS settings. None: from `TQ_TLS_CA`, `TQ_TLS_CERT` and `TQ_TLS_KEY` if they are set, else plaintext.
            False: plaintext, regardless of these variables.
        namespace: prefix of the client's partition names on the service, before a "/". Programs of one run share a
            namespace, such as "run-7", so that different runs can each have a partition "train". Tokens and quotas
            apply to full names, such as "run-7/train". None: the value of `TQ_NAMESPACE`, else no namespace. False: no
            namespace, regardless of the variable; the client then sees partitions of all namespaces, under their full
            names. A batch received from a client with another namespace still refers to the partition in that
            namespace.
        gathers_puts: whether to combine concurrent small puts and inserts into one call, if they are made in one event
            loop or by threads that share the client. Each caller gets the same answer or error as from a separate call.
            False: send each put separately.
        insecure: whether the token may be sent to other machines in plaintext; otherwise such calls raise
            InvalidArgumentError. None: the value of `TQ_INSECURE`.
    """
