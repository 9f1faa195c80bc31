"""Slots within a partition's capacity. A slot is a sample leased to a rollout worker before generation."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np

from tq_service.errors import AdmissionLimitError, InvalidArgumentError, PartitionSealedError, QuotaExceededError
from tq_service.machine.claims import ClaimAcked, check_claim
from tq_service.machine.samples import SampleWrite
from tq_service.schema import EndCounts, check_name, check_range
from tq_service.server import converters
from tq_service.server.rpc.inbox import WaitingCalls
from tq_service.server.rpc.methods import Context
from tq_service.serving.catalog import Catalog
from tq_service.serving.planner import NotYet
from tq_service.serving.slots import make_slots, start_version
from tq_service.state.partition import Partition
from tq_service.state.plan import LeaseTerms
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.messages import read_seconds
from tq_service.wire.metadata import ON_LOST


class Slots:
    """Creates slots and leases them to rollout workers.

    Args:
        catalog: the controller's partitions.
        endpoint_of: function that returns the endpoint at which clients reach a storage service instance.
        waiting: counter of calls that wait for capacity.
        max_wait_cap_seconds: maximum time that a call waits.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        endpoint_of: converters.Endpoints,
        waiting: WaitingCalls,
        max_wait_cap_seconds: float,
    ) -> None:
        self._catalog = catalog
        self._endpoint_of = endpoint_of
        self._waiting = waiting
        self._max_wait_cap_seconds = max_wait_cap_seconds

    async def acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        """Create slots once capacity is available. Puts that create samples wait in the same queue. See `Acquire`."""
        message = request.write
        recorded: pb.AcquireResponse | None = self._catalog.recorded(request.request_id, pb.AcquireResponse)
        if recorded is not None:
            return recorded
        check_name("task_name", request.task_name)
        lease = LeaseTerms(
            seconds=read_seconds("lease", request.lease), on_lost=ON_LOST.decode(request.on_lost) or "requeue"
        )
        max_wait = read_seconds("max_wait", request.max_wait)
        check_range("max_wait", max_wait, 0)
        deadline = time.monotonic() + min(max_wait, self._max_wait_cap_seconds)
        partition = self._catalog.get(message.partition_id, message.incarnation)
        write = converters.slots(request, start_version(self._catalog, partition, request.policy))
        queue = self._catalog.admission_queue(message.partition_id)
        try:
            if queue is None:
                return self._make(request, write, lease)
            with self._waiting.one(context):
                capacity = await queue.enter(request.request_id, write, 0, deadline)
            with capacity:
                return self._make(request, write, lease)
        except PartitionSealedError:
            return self._without_slots(partition, request.task_name, is_end=True)
        except (AdmissionLimitError, QuotaExceededError) as error:
            if error.retry_after_seconds is None:  # the slots will never fit
                raise
            return self._without_slots(partition, request.task_name, is_end=False)

    def _make(self, request: pb.AcquireRequest, write: SampleWrite, lease: LeaseTerms) -> pb.AcquireResponse:
        """Create and lease the slots in a single step, once per request_id."""
        partition_id, task_name = request.write.partition_id, request.task_name

        def make() -> pb.AcquireResponse:
            done = _check_holding(self._catalog, request)
            partition = self._catalog.get(partition_id, request.write.incarnation)
            now = replace(write, start_version=start_version(self._catalog, partition, request.policy))
            claim = make_slots(
                self._catalog, partition, now, task_name=task_name, request_id=request.request_id, lease=lease
            )
            if done is not None:
                self._catalog.commit(done)
            return converters.slots_answer(
                partition, claim, task_name, self._endpoint_of, now=asyncio.get_running_loop().time()
            )

        return self._catalog.run_once(request.request_id, make, pb.AcquireResponse)

    def _without_slots(self, partition: Partition, task_name: str, *, is_end: bool) -> pb.AcquireResponse:
        """Return a response without slots. Its status is "end" if the partition is sealed and "not yet" otherwise."""
        task = self._catalog.task(partition, task_name)
        answer = EndCounts(consumed_count=task.consumed_count, kept_count=task.kept_count) if is_end else NotYet()
        return converters.slots_answer(
            partition, answer, task_name, self._endpoint_of, now=asyncio.get_running_loop().time()
        )


def _check_holding(catalog: Catalog, request: pb.AcquireRequest) -> ClaimAcked | None:
    """Reject a worker whose lease on its previous samples has expired.

    Returns:
        A validated change that acknowledges the samples, or None if the request does not acknowledge any. The change
        cannot fail if it is applied in this step.

    Raises:
        LeaseExpiredError: the lease on the samples has expired.
        SampleNotFoundError: the samples were cleared, so the claim is unknown.
        InvalidArgumentError: the request lists no samples, samples that do not belong to the claim, or only some
            members of a group that must stay together.
    """
    holding = request.holding
    indexes, claim = np.array(holding.global_indexes, np.int64), converters.leased_claim(holding)
    if not request.HasField("holding") and not request.ack:
        return None
    if claim is None or not indexes.size:
        missing = "claim" if claim is None else "global_indexes"
        raise InvalidArgumentError(
            f"holding is missing {missing}. Pass the leased samples together with their claim, or unset both holding "
            f"and ack.",
            field=f"holding.{missing}",
        )
    partition = catalog.get(holding.partition_id, holding.incarnation)
    check_claim(partition, claim, indexes)
    partition.positions_of(indexes)
    if not request.ack:
        return None
    done = ClaimAcked(
        partition_id=holding.partition_id,
        task_name=claim.task_name,
        request_id=claim.request_id,
        global_indexes=indexes,
    )
    done.check(partition, partition.known_task(claim.task_name))
    return done
