"""Changes of policies: versions published, policies removed."""

from __future__ import annotations

from collections.abc import Mapping

from tq_service.errors import VersionError
from tq_service.machine.state_machine import Change, State, Step
from tq_service.schema import check_name, check_range
from tq_service.state.policies import Policy


class VersionPublished(Change):
    """A version of the weights of a policy is in use from now on.

    Attributes:
        policy: its name.
        version: 0 or more.
        rewind: whether it may be lower than the one before.
    """

    policy: str
    version: int
    rewind: bool = False

    def prepare(self, state: State) -> bool | None:
        """Return None if this version is published already.

        Raises:
            VersionError: it is lower than the published one, and no rewind.
            InvalidArgumentError: the name or the number is out of its range.
        """
        check_name("policy", self.policy)
        check_range("version", self.version, 0)
        known = state.policies.get(self.policy)
        if known is None:
            return True
        if self.version < known.version and not self.rewind:
            raise VersionError(
                f"version is {self.version}; expected at least {known.version}, which policy {self.policy!r} has. "
                f"Publish with rewind if the trainer goes back to a checkpoint.",
                metadata={"policy": self.policy, "got": str(self.version), "expected": str(known.version)},
            )
        return None if self.version == known.version else True

    def apply(self, state: State, prepared: bool, step: Step) -> None:
        """Record it, and have admissions that wait for it give back what was trained."""
        state.policies[self.policy] = Policy(name=self.policy, version=self.version, published_at=step.at_seconds)
        step.policies.append(self.policy)
        for partition in state.partitions.values():
            for admission in partition.settings.admissions:
                if admission.given_back == "published" and admission.policy == self.policy:
                    partition.tasks[admission.task_name].give_back_published()
                    step.consumed[partition] = None


def check_pace(state: State, published: VersionPublished, trained: Mapping[tuple[str, str], int]) -> None:
    """Refuse a version with which samples would be older than the batches trained since the last one account for.

    Tasks with a `max_staleness` count one version for each batch, see "The bound" in docs/asynchronous_rl.md. What has
    nothing outstanding does not mind.

    Args:
        state: before the publication.
        published: the version.
        trained: by partition and task the last batch that is reported as trained in the same step.

    Raises:
        VersionError: it is too high.
    """
    known = state.policies.get(published.policy)
    if known is None or published.rewind:
        return
    for partition in state.partitions.values():
        admission = partition.settings.bounded_admission
        if admission is None or admission.policy != published.policy:
            continue
        task = partition.tasks[admission.task_name]
        count = task.unpublished_count(trained.get((partition.partition_id, task.name), -1))
        if task.outstanding_count and published.version > known.version + count:
            raise VersionError(
                f"version is {published.version}, {published.version - known.version} more than policy "
                f"{published.policy!r} has, but task {task.name!r} of partition {partition.partition_id!r} has trained "
                f"{count} batches since: with max_staleness each version is that of a batch. Say what was trained "
                f"(trained, or Advance), and publish at most version {known.version + count}.",
                metadata={
                    "policy": published.policy,
                    "got": str(published.version),
                    "expected": str(known.version + count),
                },
            )


class PolicyRemoved(Change):
    """A policy has no version any more."""

    policy: str

    def prepare(self, state: State) -> bool | None:
        """Return None if it has none."""
        return True if self.policy in state.policies else None

    def apply(self, state: State, prepared: bool, step: Step) -> None:
        """Remove it."""
        del state.policies[self.policy]
        step.policies.append(self.policy)
