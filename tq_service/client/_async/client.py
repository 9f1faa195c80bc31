"""The client, with methods for all service calls of producers and consumers."""

from __future__ import annotations

from tq_service.client._async.partitions import AsyncPartitionCalls
from tq_service.client._async.policies import AsyncPolicyCalls
from tq_service.client._async.watching import AsyncWatchCalls
from tq_service.client._async.work import AsyncWorkCalls


class AsyncClient(AsyncPartitionCalls, AsyncWorkCalls, AsyncPolicyCalls, AsyncWatchCalls):
    """A client of a single service or of a cluster. Use it in a `with` block, or close it after use.

    Every call has a deadline of `timeout` seconds. For `claim`, `max_wait` is added to the deadline. While the service
    is unavailable, calls are retried with back-off and the same request id. A client may therefore start before its
    service. A warning is logged if the service remains unavailable. All errors derive from `TqError`; see
    docs/errors.md. A pickled client contains its address, its timeout and any paths passed to it. A token passed as
    text is not pickled; the unpickled client reads the token from the environment instead.

    Threads may share the blocking client. The client opens its channels on first use, and opens new channels after a
    fork. Several event loops in a process may share an asyncio client, even concurrently in different threads. Each
    loop has its own channels, which are dropped when the loop is closed. Closing the client in one loop closes it in
    all loops. If a process uses an asyncio client and then forks, asyncio clients in the child process raise
    PreconditionError. Start such processes with the spawn method.

    Args:
        address: "host:port", or only the host for port 50051. Defaults to the environment variable TQ_ADDRESS, or to
            localhost:50051. Invalid addresses raise InvalidArgumentError. For a cluster of controllers, pass all
            addresses as a list or a comma-separated string, or pass a DNS name that resolves to all of them. The client
            finds the current leader, and switches to the new leader after a change.
        timeout: default timeout of calls in seconds.
        token: the bearer token, or the path of a file that contains the token. The file is read again whenever it
            changes. By default, the token is read from `TQ_TOKEN`, or from the file named by `TQ_TOKEN_FILE`. If False,
            no token is used, even if these variables are set.
        tls: TLS settings. By default, the TLS settings are read from `TQ_TLS_CA`, `TQ_TLS_CERT` and `TQ_TLS_KEY`. If
            these variables are not set, calls use plaintext. If False, calls use plaintext even if the variables are
            set.
        namespace: prefix that the client adds, with a "/", to its partition names on the service. The programs of a run
            share a namespace, such as "run-7", so that each run can have a partition "train". Tokens and quotas apply
            to full names, such as "run-7/train". Defaults to `TQ_NAMESPACE`, or to no namespace if this variable is not
            set. If False, the client has no namespace even if `TQ_NAMESPACE` is set, and sees the partitions of all
            namespaces under their full names. A batch from a client with another namespace refers to the partition in
            that client's namespace.
        gathers_puts: whether to combine small, concurrent puts and inserts into one call. Such calls can come from
            tasks in an event loop or from threads that share the client. Results and errors are the same as for
            separate calls. If False, each put is sent separately.
        insecure: whether the token may be sent to other machines in plaintext. If False, a call that would send the
            token to another machine in plaintext raises InvalidArgumentError. Defaults to `TQ_INSECURE`.
    """
