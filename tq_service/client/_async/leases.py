"""Calls of queue workers about what they hold: done, to be released, or in need of more time."""

from __future__ import annotations

from typing import Any

from tq_service.client._async.calls import AsyncBase
from tq_service.client.batch_meta import BatchMeta
from tq_service.client.requests import check_leased, lease_duration
from tq_service.v1 import controller_service_pb2 as pb


class AsyncLeaseCalls(AsyncBase):
    """The part of the client for claims that were made. See `AsyncClient`."""

    async def ack(self, metadata: BatchMeta, *, timeout: float | None = None) -> int:
        """Say that the work on leased samples is done: they are not delivered again, whatever becomes of the lease.

        Put the results first. Acknowledging samples once more is fine, as is naming ones that have failed or were
        cleared meanwhile.

        Args:
            metadata: the batch, as `get_meta(lease=...)` answered it, or a part of it (`select_samples`, `chunk`); of a
                batch of whole groups whole groups.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples acknowledged by this call.

        Raises:
            LeaseExpiredError: some of the samples (the message names them) are no longer leased to this worker, and
                others may do the same work; none is acknowledged.
            InvalidArgumentError: `metadata` is not of one leased claim, or has a part of a group.
            PartitionNotFoundError: the partition was cleared. StaleIncarnationError: and created again.
        """
        check_leased(metadata)
        if not metadata.size:
            return 0
        answer = await self._ask(
            lambda to: to.AckClaim,
            pb.AckClaimRequest,
            timeout,
            **_claim_of(metadata),
            incarnation=metadata.incarnation,
            global_indexes=metadata.indexes,
        )
        return answer.acked_count

    async def extend(self, metadata: BatchMeta, lease: float, *, timeout: float | None = None) -> int:
        """Give a leased claim more time. What was acknowledged or released of it stays so.

        Args:
            metadata: the batch, as `get_meta(lease=...)` answered it, or a part of it: all of the claim is extended.
            lease: seconds from now on; also less than was left.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples that are leased.

        Raises:
            LeaseExpiredError: the lease ran out before.
            PreconditionError: nothing is left of the claim.
            InvalidArgumentError: `metadata` is not of one leased claim, or `lease` is no positive number of seconds.
            PartitionNotFoundError: the partition was cleared. StaleIncarnationError: and created again.
        """
        check_leased(metadata)
        answer = await self._ask(
            lambda to: to.ExtendClaim,
            pb.ExtendClaimRequest,
            timeout,
            **_claim_of(metadata),
            incarnation=metadata.incarnation,
            lease=lease_duration(lease),
        )
        return answer.leased_count

    async def release(self, metadata: BatchMeta, *, timeout: float | None = None) -> int:
        """Release samples that a queue worker got and will not process: they are claimable again at once.

        A released delivery does not count for `max_deliveries`. What the worker no longer holds is ignored.

        Args:
            metadata: the batch, as `get_meta` answered it; of a leased one also a part of it, of whole groups whole
                groups.
            timeout: seconds until the call fails; None: the client's.

        Returns:
            The number of samples that are claimable again; 0 where `metadata` is no claim of a queue worker.

        Raises:
            InvalidArgumentError: `metadata` has a part of a claim without a lease, or of a group.
        """
        if not metadata.claim_id or not metadata.size:
            return 0
        answer = await self._ask(
            lambda to: to.ReleaseClaim,
            pb.ReleaseClaimRequest,
            timeout,
            **_claim_of(metadata),
            global_indexes=metadata.indexes,
        )
        return answer.released_count


def _claim_of(metadata: BatchMeta) -> dict[str, Any]:
    return {
        "partition_id": metadata.partition_id,
        "task_name": metadata.task_name,
        "claim_request_id": metadata.claim_id,
    }
