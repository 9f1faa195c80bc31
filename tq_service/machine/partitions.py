"""Changes of whole partitions, and of what is recorded for retries."""

from __future__ import annotations

from dataclasses import dataclass

from tq_service.errors import AlreadyExistsError
from tq_service.machine.state_machine import Change, State, Step
from tq_service.state.partition import Partition, PartitionSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCreated(Change):
    """A partition was made, by itself or by its first samples."""

    partition_id: str
    incarnation: bytes
    settings: PartitionSettings

    def prepare(self, state: State) -> Partition:
        """Make the partition; it is not in the state yet."""
        if self.partition_id in state.partitions:
            raise AlreadyExistsError(
                f"partition {self.partition_id!r} is there; clear it first",
                metadata={"resource_type": "partition", "resource_name": self.partition_id},
            )
        return Partition(self.partition_id, self.settings, self.incarnation)

    def apply(self, state: State, prepared: Partition, step: Step) -> Partition:
        """Have it in the state."""
        state.partitions[self.partition_id] = prepared
        step.created.append(prepared)
        return prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSealed(Change):
    """No new samples come. A write that seals the partition says so itself."""

    partition_id: str

    def prepare(self, state: State) -> Partition | None:
        """Find the partition, unless it is sealed."""
        partition = state.partition(self.partition_id)
        return None if partition.sealed else partition

    def apply(self, state: State, prepared: Partition, step: Step) -> None:
        """Seal it."""
        prepared.sealed = True
        step.note_change(prepared)
        step.tasks.append((prepared, None))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCleared(Change):
    """A partition was removed."""

    partition_id: str

    def prepare(self, state: State) -> Partition:
        """Find the partition."""
        return state.partition(self.partition_id)

    def apply(self, state: State, prepared: Partition, step: Step) -> int:
        """Remove it; return how many samples it had."""
        del state.partitions[self.partition_id]
        step.freed += prepared.cells.forget_all()
        step.cleared.append(prepared)
        return prepared.table.present_count


class SnapshotNeeded(Exception):  # noqa: N818  (no fault, and none that a client sees)
    """What comes next in the log goes on from a snapshot that this controller has not.

    Attributes:
        number: the least number of a snapshot that it goes on from.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"the state was replaced: a snapshot of number {number} or more is needed")
        self.number = number


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReplaced(Change):
    """A checkpoint was restored: a snapshot, which is not in the log, has the state since.

    Attributes:
        snapshot_number: of that snapshot; what the log has since then is of that state.
    """

    snapshot_number: int

    def prepare(self, state: State) -> State:
        """Return the state.

        Raises:
            SnapshotNeeded: it is not of that snapshot.
        """
        if state.snapshot_number < self.snapshot_number:
            raise SnapshotNeeded(self.snapshot_number)
        return state

    def apply(self, state: State, prepared: State, step: Step) -> None:
        """Change nothing: the snapshot has."""
