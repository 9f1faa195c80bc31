"""Changes of policies: versions published, policies removed."""

from __future__ import annotations

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
