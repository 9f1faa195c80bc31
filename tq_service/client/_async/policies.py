"""Trainer calls, which publish versions of policy weights and record training progress."""

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
    """The client's trainer calls. See `AsyncClient`."""

    async def publish_version(
        self,
        version: int,
        *,
        policy: str = DEFAULT_POLICY,
        trained: Mapping[tuple[str, str], int] | None = None,
        rewind: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Record that a version of a policy's weights is in use.

        Publishing the same version again has no effect, so several ranks may publish it.

        Args:
            version: version number of the weights, at least 0.
            policy: name of the policy, in the client's namespace. A new name creates a policy.
            trained: the batches on which this version was trained, as a mapping of (partition_id, task_name) to the
                last batch_index. See `advance`.
            rewind: whether to accept a version lower than the published version, for example because the trainer
                resumed from a checkpoint.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Raises:
            VersionError: a higher version has been published, and `rewind` is False.
            InvalidArgumentError: `version` is negative, or a batch in `trained` was never planned.
            PartitionNotFoundError, TaskNotFoundError: a partition or task in `trained` does not exist.
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
            policy: name of the policy, in the client's namespace.
            at_least: minimum version to wait for. If this version is not published in time, the call returns a lower
                version. If None, any version is accepted.
            max_wait: seconds to wait for the version.
            timeout: seconds until the call fails, in addition to `max_wait`. Defaults to the client's `timeout`.

        Raises:
            PolicyNotFoundError: no version of the policy was published in time.
        """
        wait = seconds("max_wait", max_wait)
        request = request_of(pb.GetVersionRequest, policy=self._namespace.full_name(policy), at_least=at_least)
        waited, deadline = Deadline.after(wait), self._deadline(timeout, wait)

        async def attempt(wait_seconds: float) -> int:
            request.max_wait.CopyFrom(to_duration(wait_seconds))
            try:
                return (await self._calls.unary_once(pb.GetVersionResponse, request, deadline)).version
            except PolicyNotFoundError:  # the service may limit how long a single call waits
                if not waited.remaining():
                    raise
                return -1

        return await self._calls.polled(attempt, lambda version: version < (at_least or 0), waited, deadline)

    async def remove_policy(
        self, policy: str = DEFAULT_POLICY, *, missing_ok: bool = False, timeout: float | None = None
    ) -> bool:
        """Remove a policy, for example after its run has ended. Return whether the policy existed.

        Args:
            policy: name of the policy, in the client's namespace.
            missing_ok: whether to return False instead of raising an error if the policy does not exist.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Raises:
            PolicyNotFoundError: no version of the policy has been published and `missing_ok` is False.
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
        """Record the progress of a trainer. An index lower than the recorded index has no effect.

        Args:
            partition_id: the partition.
            task_name: the task that the trainer's ranks run.
            trained: index of the last batch that the ranks have trained on. All earlier batches also count as trained.
                If None, the recorded index does not change.
            saved: index of the last batch covered by a trainer checkpoint. All earlier batches also count as covered,
                and all covered batches count as trained. If None, the recorded index does not change. If the partition
                has a matching `Release`, samples that a resume no longer needs are cleared.
            incarnation: expected incarnation of the partition. An empty value accepts any incarnation.
            epoch: expected epoch of the task. If None, any epoch is accepted.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Raises:
            InvalidArgumentError: a batch was never planned, or both `trained` and `saved` are None.
            PartitionNotFoundError, TaskNotFoundError: the partition or task does not exist.
            StaleIncarnationError: the partition was cleared and created again.
            StaleEpochError: the task was reset.
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
        """Let a new set of ranks continue a task after its last trained batch. The number of ranks may change.

        The next epoch of the task begins, and claims of the previous ranks are rejected. Trained batches stay consumed.
        Batches that were delivered or prefetched but not trained on are planned again.
        `StreamingDataLoader.load_state_dict` makes this call if the `dp_size` of the saved state differs.

        Args:
            partition_id: the partition.
            task_name: the task for which the ranks claim batches.
            dp_size: number of ranks after the restart.
            trained: index of the last batch that the ranks have trained on. All earlier batches also count as trained.
                Pass -1 if the ranks have not trained on any batch. Defaults to the index recorded by `advance`.
            incarnation: expected incarnation of the partition. An empty value accepts any incarnation.
            epoch: epoch of the previous ranks. If set, all new ranks may make this call. Until the new ranks have
                trained on their first batch, only the first of these calls restarts the task. If None, every call
                restarts the task.
            timeout: seconds until the call fails. Defaults to the client's `timeout`.

        Raises:
            InvalidArgumentError: the batch at index `trained` was never planned, or `dp_size` is out of range.
            PartitionNotFoundError, TaskNotFoundError: the partition or task does not exist.
            StaleIncarnationError: the partition was cleared and created again.
            StaleEpochError: the task has not reached `epoch`.
            SamplesClearedError: samples in batches after `trained` have been cleared.
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
