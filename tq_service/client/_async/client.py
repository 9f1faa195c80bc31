"""The client: every call of the service, for producers and consumers."""

from __future__ import annotations

from tq_service.client._async.claims import AsyncClaimCalls
from tq_service.client._async.fetches import AsyncFetchCalls
from tq_service.client._async.partitions import AsyncPartitionCalls
from tq_service.client._async.policies import AsyncPolicyCalls
from tq_service.client._async.samples import AsyncSampleCalls
from tq_service.client._async.watching import AsyncWatchCalls


class AsyncClient(
    AsyncPartitionCalls, AsyncSampleCalls, AsyncFetchCalls, AsyncClaimCalls, AsyncPolicyCalls, AsyncWatchCalls
):
    """A client of the service at one address. Use it in a `with` block, or close it.

    Every call has a deadline of `timeout` seconds (`get_meta`: beyond its `max_wait`), and is tried again with back-off
    under one request id while the service is unavailable, so that a client may start before its service; a warning is
    logged when that lasts. Errors derive
    from `TqError`, see docs/errors.md. Pickled, it is its address, its timeout and the paths it was given: a token that
    was given as text is not in the pickle, and is taken from the environment where it is unpickled.

    `Client` is for threads; it opens its channels on first use, and new ones after a fork. `AsyncClient` may be used by
    several event loops of a process, also at the same time in several threads: each gets channels of its own, which
    `aclose` in any of them closes; those of a loop that was closed are left. In a process forked from one that has
    used an AsyncClient it raises PreconditionError: start processes by spawn.

    Args:
        address: "host:port", or the host alone for port 50051; None: the environment variable TQ_ADDRESS, else
            localhost:50051. What cannot be an address raises InvalidArgumentError. Of several controllers of a cluster
            give the addresses, in a list or with commas between them, or a DNS name of all: the one that leads is
            found, and its successor.
        timeout: default deadline of the calls, in seconds.
        token: the bearer token, or the path of a file that holds it and is read again when it changes; None:
            `TQ_TOKEN`, else the file that `TQ_TOKEN_FILE` names, else none; False: none, whatever they say.
        tls: how to reach the service over TLS; None: as `TQ_TLS_CA`, `TQ_TLS_CERT` and `TQ_TLS_KEY` say, else in
            plaintext; False: in plaintext, whatever they say.
        namespace: what the names of its partitions begin with on the service, before a "/": programs of one run give
            the same, such as "run-7", so that the "train" of one run is not that of another. Tokens and quotas are for
            the service's names: "run-7/train". None: `TQ_NAMESPACE`, else none; False: none, whatever it says: then
            partitions of all namespaces have their full names. A batch of another namespace is taken for what it is.
        gathers_puts: whether small puts and inserts that wait at the same moment, in one event loop or in threads that
            share the client, are sent as one. Each caller gets the same answer or error as by itself. False: each is
            sent by itself.
        insecure: whether the token may be sent in plaintext to other machines, which raises InvalidArgumentError
            otherwise; None: whether `TQ_INSECURE` is true.
    """
