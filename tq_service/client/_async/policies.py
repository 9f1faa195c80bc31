"""Calls of trainers about the versions of their weights, and about their progress."""

from __future__ import annotations

from collections.abc import Mapping

from tq_service.client._async.calls import AsyncBase
from tq_service.client.requests import request_of, seconds
from tq_service.client.transport import Deadline
from tq_service.errors import InvalidArgumentError, PolicyNotFoundError
from tq_service.results import RestartedRanks, TrainerProgress
from tq_service.schema import DEFAULT_POLICY
from tq_service.v1 import controller_service_pb2 as pb
from tq_service.wire.messages import read_message, to_duration


class AsyncPolicyCalls(AsyncBase):
    """The part of the client for versions of policies. See `AsyncClient`."""

    async def publish_version(
        self,
        version: int,
        *,
        policy: str = DEFAULT_POLICY,
        trained: Mapping[tuple[str, str], int] | None = None,
        rewind: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Record that a version of the weights of a policy is in use.

        Publishing the same version again changes nothing, so several ranks may publish it.

        Args:
            version: the number of the weights, 0 or more.
            policy: its name, in the client's namespace; a new one is added.
            trained: batches trained for this version: by (partition_id, task_name) the last batch_index, as for
                `advance`.
            rewind: whether the version may be lower than the published one, because the trainer went back to a
                checkpoint.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            VersionError: a higher version is published, and `rewind` is False.
            InvalidArgumentError: `version` is negative, or a batch was never planned.
            PartitionNotFoundError, TaskNotFoundError: a partition or task of `trained` does not exist.
            LimitExceededError: there are too many policies.
        """
        given = (trained or {}).items()
        if not all(isinstance(named, tuple) and len(named) == 2 for named, _ in given):
            raise InvalidArgumentError(
                f"trained is {trained!r:.200}; expected a mapping such as {{('train', 'update_actor'): 41}}",
                field="trained",
            )
        await self._ask(
            pb.PublishVersionResponse,
            timeout,
            policy=self._namespace.full_name(policy),
            version=version,
            rewind=rewind,
            trained=[
                request_of(
                    pb.TrainedBatches,
                    partition_id=self._namespace.full_name(partition_id),
                    task_name=task_name,
                    batch_index=batch_index,
                )
                for (partition_id, task_name), batch_index in given
            ],
        )

    async def get_version(
        self,
        *,
        policy: str = DEFAULT_POLICY,
        at_least: int | None = None,
        max_wait: float = 0.0,
        timeout: float | None = None,
    ) -> int:
        """Return the published version of a policy.

        Args:
            policy: its name, in the client's namespace.
            at_least: version to wait for; None: any. If it is not published in time, the call returns a lower one.
            max_wait: seconds to wait for it.
            timeout: seconds beyond `max_wait` until the call fails; None: the client's.

        Raises:
            PolicyNotFoundError: no version of it was published in time.
        """
        wait = seconds("max_wait", max_wait)
        request = request_of(pb.GetVersionRequest, policy=self._namespace.full_name(policy), at_least=at_least)
        waited, deadline = Deadline.after(wait), self._deadline(timeout, wait)

        async def attempt(wait_seconds: float) -> int:
            request.max_wait.CopyFrom(to_duration(wait_seconds))
            try:
                return (await self._calls.unary_once(pb.GetVersionResponse, request, deadline)).version
            except PolicyNotFoundError:  # the service may cap how long one call waits
                if not waited.remaining():
                    raise
                return -1

        return await self._calls.polled(attempt, lambda version: version < (at_least or 0), waited, deadline)

    async def remove_policy(
        self, policy: str = DEFAULT_POLICY, *, missing_ok: bool = False, timeout: float | None = None
    ) -> bool:
        """Remove a policy, such as that of a finished run; return whether it existed.

        Args:
            policy: its name, in the client's namespace.
            missing_ok: whether it may be missing.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            PolicyNotFoundError: it has not been published, unless `missing_ok`.
        """
        name = self._namespace.full_name(policy)
        return (await self._ask(pb.RemovePolicyResponse, timeout, policy=name, missing_ok=missing_ok)).removed

    async def advance(
        self,
        partition_id: str,
        task_name: str,
        *,
        trained: int | None = None,
        saved: int | None = None,
        incarnation: bytes = b"",
        epoch: int | None = None,
        timeout: float | None = None,
    ) -> TrainerProgress:
        """Record the progress of a trainer. A lower index than before changes nothing.

        Args:
            partition_id: the partition.
            task_name: the task of the trainer's ranks.
            trained: last batch_index that was trained, including all before it; None: unchanged.
            saved: last batch_index covered by a checkpoint of the trainer, including all before it, which count as
                trained; None: unchanged. Samples that a resume no longer needs are released if the partition has
                such a `Release`.
            incarnation: expected incarnation of the partition; empty: any.
            epoch: expected epoch of the task; None: any.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            InvalidArgumentError: a batch was never planned, or neither `trained` nor `saved` is given.
            PartitionNotFoundError, TaskNotFoundError: the partition or task does not exist.
            StaleIncarnationError, StaleEpochError: it was cleared and created again, or the task was reset.
        """
        answer = await self._ask(
            pb.AdvanceResponse,
            timeout,
            partition_id=partition_id,
            task_name=task_name,
            trained=trained,
            saved=saved,
            incarnation=incarnation,
            epoch=epoch,
        )
        return read_message(TrainerProgress, answer)

    async def restart_ranks(
        self,
        partition_id: str,
        task_name: str,
        *,
        dp_size: int,
        trained: int | None = None,
        incarnation: bytes = b"",
        epoch: int | None = None,
        timeout: float | None = None,
    ) -> RestartedRanks:
        """Continue a task with restarted ranks, of any number, after the last trained batch.

        The next epoch of the task begins: claims of the previous ranks are refused. Trained batches stay consumed;
        batches that were only delivered or prefetched are planned again. `StreamingDataLoader.load_state_dict` calls
        this for a state with another `dp_size`.

        Args:
            partition_id: the partition.
            task_name: the task.
            dp_size: number of ranks.
            trained: last batch_index that was trained, including all before it; -1: none. None: as recorded by
                `advance`.
            incarnation: expected incarnation of the partition; empty: any.
            epoch: epoch of the previous ranks. With it, each of the new ranks may make this call: the first call
                restarts them. Calls after the new ranks have trained their first batch restart them again. None: every
                call restarts them.
            timeout: seconds until the call fails; None: the client's.

        Raises:
            InvalidArgumentError: a batch was never planned, or `dp_size` is out of its range.
            PartitionNotFoundError, TaskNotFoundError: the partition or task does not exist.
            StaleIncarnationError: the partition was cleared and created again.
            StaleEpochError: the task has not reached `epoch`.
            SamplesClearedError: samples of batches after `trained` were released.
        """
        answer = await self._ask(
            pb.RestartRanksResponse,
            timeout,
            partition_id=partition_id,
            task_name=task_name,
            dp_size=dp_size,
            trained=trained,
            incarnation=incarnation,
            epoch=epoch,
        )
        return read_message(RestartedRanks, answer)
