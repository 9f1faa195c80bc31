"""Changes of policies: versions published, policies removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tq_service.errors import PreconditionError, VersionError
from tq_service.machine.state_machine import Change, State, Step
from tq_service.schema import check_name, check_range
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.policies import Policy


class VersionPublished(Change):
    """A version of the weights of a policy was published.

    Attributes:
        policy: its name.
        version: 0 or more.
        rewind: whether it may be lower than the published version.
    """

    policy: str
    version: int
    rewind: bool = False

    def prepare(self, state: State) -> bool | None:
        """Return None if this version is published already.

        Raises:
            VersionError: it is lower than the published version, and `rewind` is not set.
            InvalidArgumentError: the name is invalid or the version is out of range.
        """
        check_name("policy", self.policy)
        check_range("version", self.version, 0)
        known = state.policies.get(self.policy)
        if known is None:
            return True
        if self.version < known.version and not self.rewind:
            raise VersionError(
                f"version is {self.version}; expected at least {known.version}, that of policy {self.policy!r}. "
                f"Publish with rewind if the trainer goes back to a checkpoint.",
                metadata={"policy": self.policy, "got": str(self.version), "expected": str(known.version)},
            )
        return None if self.version == known.version else True

    def apply(self, state: State, prepared: bool, step: Step) -> None:
        """Record the version; admissions that wait for it free the capacity of trained samples."""
        state.policies[self.policy] = Policy(name=self.policy, version=self.version, published_at=step.at_seconds)
        step.policies.append(self.policy)
        for partition in state.partitions.values():
            for admission in partition.settings.admissions:
                if admission.given_back == "published" and admission.policy == self.policy:
                    partition.tasks[admission.task_name].give_back_published()
                    step.consumed[partition] = None


def check_pace(state: State, published: VersionPublished, trained: Mapping[tuple[str, str], int]) -> None:
    """Refuse a version that makes samples older than the number of batches trained since the last version allows.

    Tasks with a `max_staleness` count one version per batch; see "The bound" in docs/asynchronous_rl.md. Tasks without
    outstanding work accept any version.

    Args:
        state: the state before the publication.
        published: the version.
        trained: the last batch reported as trained in the same step, by partition and task.

    Raises:
        VersionError: it is too high.
    """
    known = state.policies.get(published.policy)
    if known is None:  # nothing can be outstanding either
        return
    for partition, task in _bounded(state, published.policy):
        count = task.unpublished_count(trained.get((partition.partition_id, task.name), -1))
        if published.version > known.version + count:
            raise VersionError(
                f"version is {published.version}, {published.version - known.version} more than policy "
                f"{published.policy!r} has, but task {task.name!r} of partition {partition.partition_id!r} has trained "
                f"{count} batches since: with max_staleness, one version counts one batch. Report trained batches "
                f"(trained, or Advance), and publish at most version {known.version + count}. If the trainer went "
                f"back to a checkpoint, restart its ranks (RestartRanks).",
                metadata={
                    "policy": published.policy,
                    "got": str(published.version),
                    "expected": str(known.version + count),
                },
            )


def _bounded(state: State, policy: str) -> Iterator[tuple[Partition, TaskLedger]]:
    """Yield the tasks with outstanding work whose staleness is counted in versions of a policy."""
    for partition in state.partitions.values():
        admission = partition.settings.bounded_admission
        if admission is not None and admission.policy == policy:
            task = partition.tasks[admission.task_name]
            if task.outstanding_count:
                yield partition, task


class PolicyRemoved(Change):
    """A policy and its version were removed."""

    policy: str

    def prepare(self, state: State) -> bool | None:
        """Return None if the policy does not exist.

        Raises:
            PreconditionError: it bounds the staleness of outstanding work.
        """
        if (bounded := next(_bounded(state, self.policy), None)) is not None:
            partition, task = bounded
            raise PreconditionError(
                f"policy {self.policy!r} bounds the staleness of {task.outstanding_count} outstanding units for task "
                f"{task.name!r} of partition {partition.partition_id!r}; clear the partition first",
                reason="STALENESS_BOUNDED",
                metadata={"partition_id": partition.partition_id, "task_name": task.name},
            )
        return True if self.policy in state.policies else None

    def apply(self, state: State, prepared: bool, step: Step) -> None:
        """Remove the policy."""
        del state.policies[self.policy]
        step.policies.append(self.policy)
