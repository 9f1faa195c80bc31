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

    def filled_conf(self) -> Any:
        """Return the configuration with the address and the namespace."""
        if "controller" not in self.conf:
            self.conf["controller"] = {}
        self.conf["controller"].update({"address": self.address, "namespace": self.namespace})
        return self.conf


@dataclass(frozen=True, slots=True)
class KnownPartition:
    """The partition that samplers of users are given: its name, and the custom_meta of its samples."""

    partition_id: str
    tags: Mapping[int, Mapping[str, Any]]

    def get_custom_meta(self, global_indices: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        """Return the custom_meta of those of these samples that have some."""
        return {index: tags for index in global_indices if (tags := self.tags.get(index))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The answer of a sampler of users.

    Attributes:
        incarnation: of the partition that the sampler remembers. Another one than that of the look-up: nothing was
            sampled; look up again, and say with the next call that this incarnation was replaced.
        sampled: the samples of the batch.
        consumed: those that the task has consumed with it.
        others: incarnations by name of other partitions that the sampler remembers, if this one is new to it.
    """

    incarnation: bytes
    sampled: Indexes = field(default_factory=list)
    consumed: Indexes = field(default_factory=list)
    others: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Remembered:
    """A partition in the state of a sampler; `last_given` is the highest index that it has ever chosen there."""

    incarnation: bytes
    last_given: int = -1


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
        self._remembered: dict[str, _Remembered] = {}

    def run(self) -> Run:
        """Return what the processes of the run share."""
        return self._run

    def get_config(self) -> Any:
        """Return the configuration of the run, as TransferQueue's actor does."""
        return self._run.filled_conf()

    def sample(
        self,
        ready_indexes: Indexes,
        batch_size: int,
        partition_id: str,
        task_name: str,
        tags: Mapping[int, Mapping[str, Any]],
        config: Config,
        *,
        incarnation: bytes,
        replaced: bytes = b"",
    ) -> Choice:
        """Have the sampler choose samples, for one caller at a time: it may keep state.

        It forgets a partition once that was cleared, or once all that it chose there was cleared and it would choose it
        again. Callers may come late with an old look-up, and incarnations have no order. So a new one counts only if
        the caller has looked it up after an answer named the one that it replaces.

        Args:
            ready_indexes: samples that may be chosen.
            batch_size: number of samples.
            partition_id: their partition.
            task_name: the consumer.
            tags: custom_meta by index of all samples of the partition.
            config: the sampling_config of the call.
            incarnation: of the partition, as the caller has looked it up.
            replaced: the incarnation that an earlier answer has named.
        """
        sampler = self._run.sampler
        with self._sampling:
            known = self._remembered.get(partition_id)
            others = {} if known else {name: each.incarnation for name, each in self._remembered.items()}
            if known is not None and known.incarnation != incarnation:
                if known.incarnation != replaced:
                    return Choice(incarnation=known.incarnation)
                sampler.clear_cache(partition_id)
                known = None
            if known is None:
                known = self._remembered[partition_id] = _Remembered(incarnation)

            def choose() -> Sampled:
                if len(ready_indexes) < batch_size and not sampler.has_cached_result(partition_id, task_name, config):
                    return [], []
                return sampler(ready_indexes, batch_size, partition=KnownPartition(partition_id, tags), **config)

            sampled, consumed = choose()
            if sampled and tags.keys().isdisjoint(sampled):
                # Indexes only grow. Where all are higher than any that was chosen, all that was chosen is gone.
                is_over = bool(tags) and min(tags) > known.last_given
                if is_over:
                    sampler.clear_cache(partition_id)
                sampled, consumed = choose() if is_over else ([], [])
            known.last_given = max([known.last_given, *sampled, *consumed])
            return Choice(incarnation=incarnation, sampled=sampled, consumed=consumed, others=others)

    def forget(self, partitions: Mapping[str, bytes]) -> None:
        """Have the sampler forget these incarnations of partitions, which are gone."""
        with self._sampling:
            for partition_id, incarnation in partitions.items():
                known = self._remembered.get(partition_id)
                if known is not None and known.incarnation == incarnation:
                    del self._remembered[partition_id]
                    self._run.sampler.clear_cache(partition_id)

    def stop(self) -> None:
        """End the service that was started for the run."""
        if self._service is not None:
            self._service.stop()

    @classmethod
    def options(cls, **options: Any) -> Any:
        """Return the class as Ray's actor with these options."""
        return sys.modules["ray"].remote(cls).options(**options)
