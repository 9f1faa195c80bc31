"""What the processes of a run share: where its service is, and how batches are chosen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tq_service.compat.owned_service import OwnedService
from transfer_queue.sampler import BaseSampler, Config, Indexes, Sampled

OWN_CHECKPOINT_DIR: Final = "/"
"""Of a service that a run starts for itself: it writes checkpoints wherever its processes want them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One use of a service, from `init()` to `close()`, by however many processes.

    Attributes:
        conf: the configuration that it was begun with.
        address: of the service; empty: one is to be started.
        namespace: of its partitions; empty: none.
        sampler: chooses the samples of a batch.
        service: settings of a service that is to be started.
        token: for the service; None: as the environment of each process says.
        is_service_owned: whether the service was started for the run.
    """

    conf: Any
    address: str
    namespace: str
    sampler: BaseSampler
    service: Mapping[str, Any] = field(default_factory=dict)
    token: str | None = None
    is_service_owned: bool = False


@dataclass(frozen=True, slots=True)
class KnownPartition:
    """What samplers of users look at for the custom_meta of samples that are ready."""

    tags: Mapping[int, Mapping[str, Any]]

    def get_custom_meta(self, global_indices: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        """Return the custom_meta of each of these samples."""
        return {index: self.tags[index] for index in global_indices}


class TransferQueueController:
    """Begins a run, and holds what its processes share: in the one that began it, or as a Ray actor of a known name.

    Args:
        run: what is to begin.
        host: where a service that is to be started listens; None: for this machine alone.
    """

    def __init__(self, run: Run, host: str | None = None) -> None:
        self._service: OwnedService | None = None
        if not run.address:
            self._service = OwnedService(host, {"checkpoint_dir": OWN_CHECKPOINT_DIR, **run.service})
            run = replace(run, address=self._service.address, token=self._service.token, is_service_owned=True)
        self._run = run
        self._sampling = threading.Lock()

    def run(self) -> Run:
        """Return what the processes of the run share."""
        return self._run

    def sample(
        self,
        ready_indexes: Indexes,
        batch_size: int,
        partition_id: str,
        task_name: str,
        tags: Mapping[int, Mapping[str, Any]],
        config: Config,
    ) -> Sampled:
        """Have the sampler choose samples, for one caller at a time: it may keep state."""
        sampler = self._run.sampler
        with self._sampling:
            if len(ready_indexes) < batch_size and not sampler.has_cached_result(partition_id, task_name, config):
                return [], []
            return sampler(ready_indexes, batch_size, partition=KnownPartition(tags), **config)

    def stop(self) -> None:
        """End the service that was started for the run."""
        if self._service is not None:
            self._service.stop()

    @classmethod
    def options(cls, **options: Any) -> Any:
        """Return the class as Ray's actor with these options."""
        return sys.modules["ray"].remote(cls).options(**options)
