"""Changes that publish a policy version or remove a policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tq_service.errors import PreconditionError, VersionError
from tq_service.machine.state_machine import Change, State, Step
from tq_service.schema import check_name, check_range
from tq_service.state.ledger import TaskLedger
from tq_service.state.partition import Partition
from tq_service.state.policies import Policy


class VersionPublished(Change):
    """A version of a policy was published.

    Attributes:
        policy: name of the policy.
        version: published version; at least 0.
        rewind: whether the version may be lower than the previous one.
    """

    policy: str
    version: int
    rewind: bool = False

    def prepare(self, state: State) -> bool | None:
        """Return True if this version has not been published yet, otherwise None.

        Raises:
            VersionError: the version is lower than the published one, and `rewind` is not set.
            InvalidArgumentError: the name is invalid, or the version is out of range.
        """
        check_name("policy", self.policy)
        check_range("version", self.version, 0)
        known = state.policies.get(self.policy)
        if known is None:
            return True
        if self.version < known.version and not self.rewind:
            raise VersionError(
                f"version is {self.version}; expected at least {known.version}, the published version of policy "
                f"{self.policy!r}. Publish with rewind if the trainer returned to a checkpoint.",
                metadata={"policy": self.policy, "got": str(self.version), "expected": str(known.version)},
            )
        return None if self.version == known.version else True

    def apply(self, state: State, prepared: bool, step: Step) -> None:
        """Record the version, and free the capacity that trained samples reserve until the next publication."""
        state.policies[self.policy] = Policy(name=self.policy, version=self.version, published_at=step.at_seconds)
        step.policies.append(self.policy)
        for partition in state.partitions.values():
            for admission in partition.settings.admissions:
                if admission.given_back == "published" and admission.policy == self.policy:
                    partition.tasks[admission.task_name].give_back_published()
                    step.consumed[partition] = None


def check_pace(state: State, published: VersionPublished, trained: Mapping[tuple[str, str], int]) -> None:
    """Raise an error if a new version exceeds what the batches trained since the last publication allow.

    For tasks with a `max_staleness`, each version corresponds to one batch. The new version may therefore exceed the
    published one by at most the number of batches trained since that publication. See "The bound" in
    docs/asynchronous_rl.md. A task without outstanding work accepts any version.

    Args:
        state: state before the publication.
        published: the new publication, which has not been applied yet.
        trained: batch_index of the last trained batch reported with the publication, by partition and task.

    Raises:
        VersionError: the version is too high.
    """
    known = state.policies.get(published.policy)
    if known is None:  # without a published version, no work can be outstanding
        return
    for partition, task in _bounded(state, published.policy):
        count = task.unpublished_count(trained.get((partition.partition_id, task.name), -1))
        if published.version > known.version + count:
            raise VersionError(
                f"version is {published.version}, which is {published.version - known.version} more than the "
                f"published version of policy {published.policy!r}, but task {task.name!r} of partition "
                f"{partition.partition_id!r} has trained {count} batches since then. With max_staleness, each version "
                "corresponds to one batch. Report trained batches (trained, or Advance), and publish at most version "
                f"{known.version + count}. If the trainer returned to a checkpoint, restart its ranks (RestartRanks).",
                metadata={
                    "policy": published.policy,
                    "got": str(published.version),
                    "expected": str(known.version + count),
                },
            )


def _bounded(state: State, policy: str) -> Iterator[tuple[Partition, TaskLedger]]:
    """Yield the partition and ledger of each task that has outstanding work and bounds its staleness by `policy`."""
    for partition in state.partitions.values():
        admission = partition.settings.bounded_admission
        if admission is not None and admission.policy == policy:
            task = partition.tasks[admission.task_name]
            if task.outstanding_count:
                yield partition, task


class PolicyRemoved(Change):
    """A policy was removed together with its published version."""

    policy: str

    def prepare(self, state: State) -> bool | None:
        """Return True if the policy exists, otherwise None.

        Raises:
            PreconditionError: a staleness limit on outstanding work depends on the policy.
        """
        if (bounded := next(_bounded(state, self.policy), None)) is not None:
            partition, task = bounded
            raise PreconditionError(
                f"could not remove policy {self.policy!r}, because it bounds the staleness of "
                f"{task.outstanding_count} outstanding units of task {task.name!r} in partition "
                f"{partition.partition_id!r}. Clear the partition first",
                reason="STALENESS_BOUNDED",
                metadata={"partition_id": partition.partition_id, "task_name": task.name},
            )
        return True if self.policy in state.policies else None

    def apply(self, state: State, prepared: bool, step: Step) -> None:
        """Remove the policy from the state."""
        del state.policies[self.policy]
        step.policies.append(self.policy)
