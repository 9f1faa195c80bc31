"""Records a controller's batches, with their bytes from the storage service in this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from tq_service.recording.layout import RecordedStep
from tq_service.recording.recorder import Recorder, TaskEpoch
from tq_service.results import RecordingStatus
from tq_service.server.converters import samples_meta
from tq_service.serving.catalog import Catalog
from tq_service.state.ledger import Claim
from tq_service.state.partition import Partition
from tq_service.storage.engine import StorageEngine
from tq_service.v1 import metadata_pb2
from tq_service.version import BUILD
from tq_service.wire.metadata import encode_spec

_log = logging.getLogger(__name__)


class StepRecording:
    """Passes each batch to the recorder as soon as it has been planned.

    Args:
        recorder: open recorder, which writes the batches.
        catalog: the controller's partitions.
        engine: engine that stores the samples' bytes. Batches with samples in other storage services are counted as
            skipped.
        after_durable: function that takes a callback, and calls it once the plan is durable. A plan that could be lost
            in a crash must not be recorded.
    """

    def __init__(
        self,
        recorder: Recorder,
        catalog: Catalog,
        engine: StorageEngine,
        after_durable: Callable[[Callable[[], None]], object],
    ) -> None:
        self._recorder = recorder
        self._catalog = catalog
        self._engine = engine
        self._after_durable = after_durable

    def start(self, recorded: Mapping[TaskEpoch, int]) -> None:
        """Record all existing batches that have not yet been recorded, and all batches planned from now on.

        Args:
            recorded: last recorded batch_index of each task epoch.
        """
        for partition in self._catalog.partitions():
            for task in partition.tasks.values():
                last = recorded.get((partition.incarnation, task.name, task.epoch), -1)
                for batch in [each for index, each in task.batches.items() if index > last]:
                    if bool((partition.table.find(batch.plan.rows) >= 0).all()):
                        self._take(partition, task.name, batch)
        self._catalog.on_planned.append(self._take)

    def status(self) -> RecordingStatus:
        """Return the status of the recording."""
        return self._recorder.status()

    def _take(self, partition: Partition, task_name: str, batch: Claim) -> None:
        """Pass a batch to the recorder. An error stops the recording, but the call that planned the batch continues."""
        if not self._recorder.is_recording:
            return
        began_at = time.thread_time()
        try:
            self._after_durable(self._taken(partition, task_name, batch))
        except Exception as error:
            self._recorder.fail(error)
        self._recorder.count_seconds(time.thread_time() - began_at)

    def _taken(self, partition: Partition, task_name: str, batch: Claim) -> Callable[[], None]:
        meta = samples_meta(partition, batch.plan.rows, list(partition.cells.fields), _no_endpoint)
        meta.epoch = partition.tasks[task_name].epoch
        empty_fields = []
        if not all(batch.plan.sizes) and batch.batch_spec is not None:
            specs = map(partition.cells.last_spec, batch.batch_spec.data_fields)
            empty_fields = [encode_spec(spec).SerializeToString() for spec in specs if spec is not None]
        policies = self._catalog.policies
        step = RecordedStep(
            number=0,
            version=BUILD,
            partition_id=partition.partition_id,
            incarnation=partition.incarnation,
            task_name=task_name,
            epoch=meta.epoch,
            batch_index=batch.batch_index,
            recorded_at=time.time(),
            plan=batch.plan,
            batch_spec=batch.batch_spec,
            policies=tuple((name, policies[name].version) for name in sorted(policies)),
            meta=meta.SerializeToString(),
            empty_fields=tuple(empty_fields),
        )
        own = (self._engine.storage_id, self._engine.boot_id)
        storages = [(each.storage_id, each.boot_id) for each in meta.locations.storages]
        if any(each != own for each in storages):
            self._recorder.skip("some of the batch's samples are in another storage service")
            return _nothing
        return self._recorder.take(step, [put.put_id for put in meta.locations.puts], self._engine.keep)


def _no_endpoint(_storage_id: str, _boot_id: bytes) -> metadata_pb2.StorageEndpoint | None:
    return None


def _nothing() -> None:
    pass
