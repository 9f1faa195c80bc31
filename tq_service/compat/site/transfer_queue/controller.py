"""State shared by the processes of a run: the sampler, and the service if the run started one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

import tq_service as tq
from tq_service.testing import ServiceProcess
from transfer_queue.client import of_samples
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler import BaseSampler, Config, Indexes, Sampled, claim_name
from transfer_queue.storage import StorageKeyNotFoundError

OWN_CHECKPOINT_DIR: Final = "/"
"""The `checkpoint_dir` of a service started for a run: the root directory, so checkpoints can be saved anywhere."""


def setting(conf: Any, *names: str, default: Any = None) -> Any:
    """Return a nested setting from a dict or DictConfig, or the default if the setting is missing."""
    for name in names:
        conf = conf.get(name) if conf is not None else None
    return default if conf is None else conf


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A set of processes that use the same service, from the call to `init()` until the call to `close()`.

    Attributes:
        conf: configuration used to start the run.
        address: address of the service. If empty, the run starts a service.
        namespace: namespace of the run's partitions. If empty, the run uses no namespace.
        sampler: chooses the samples for each batch.
        service: settings for the service, if the run starts it.
        token: token for the service. If None, each process reads the token from its environment.
        is_service_owned: whether the service was started for the run.
    """

    conf: Any
    address: str
    namespace: str
    sampler: BaseSampler
    service: Mapping[str, Any] = field(default_factory=dict)
    token: str | None = None
    is_service_owned: bool = False

    def client_options(self) -> dict[str, Any]:
        """Return the arguments for creating clients of the service."""
        reached: dict[str, Any] = {
            "address": self.address,
            "namespace": self.namespace or False,
            "timeout": float(setting(self.conf, "controller", "timeout_seconds", default=60.0)),
        }
        return reached if self.token is None else reached | {"token": self.token, "insecure": True}

    def filled_conf(self) -> Any:
        """Return the configuration with the address and the namespace filled in."""
        if "controller" not in self.conf:
            self.conf["controller"] = {}
        self.conf["controller"].update({"address": self.address, "namespace": self.namespace})
        return self.conf


@dataclass(frozen=True, slots=True)
class KnownPartition:
    """A partition as custom samplers see it: its name and the custom_meta of its samples."""

    partition_id: str
    tags: Mapping[int, Mapping[str, Any]]

    def get_custom_meta(self, global_indices: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        """Return the custom_meta of the given samples. Samples without custom_meta are omitted."""
        return {index: tags for index in global_indices if (tags := self.tags.get(index))}


@dataclass(slots=True)
class _Remembered:
    """Stored state of a partition. `last_given` is the highest index that the sampler has chosen from the partition."""

    incarnation: bytes
    last_given: int = -1


class TransferQueueController:
    """The controller of a run, which stores the state shared by its processes.

    The controller is a named Ray actor, or an object in the process that started the run.

    Args:
        run: the run to start.
        host: host on which a newly started service listens. If None, the service listens only on the loopback address.
    """

    def __init__(self, run: Run, host: str | None = None) -> None:
        self._ending = ExitStack()
        self._run = run if run.address else self._with_own_service(run, host)
        self._sampling = threading.Lock()
        self._client: tq.Client | None = None  # created when the sampler is first called
        self._remembered: dict[str, _Remembered] = {}

    def _with_own_service(self, run: Run, host: str | None) -> Run:
        """Start a service in a separate process. The service stops when this process ends.

        If other machines can reach the host, the service requires a token known only to the run. Traffic is not
        encrypted, as is usual between processes in a Ray cluster. On the loopback address, the service requires no
        token.
        """
        settings = {"grace_seconds": 1, "checkpoint_dir": OWN_CHECKPOINT_DIR, **run.service}
        flags, token = [part for name, value in settings.items() for part in _flag(name, value)], None
        with ExitStack() as starting:
            if host is not None:
                from tq_service.server import credential_files as files  # noqa: PLC0415  (a loopback service has none)

                token = files.new_secret()
                path = Path(starting.enter_context(TemporaryDirectory(prefix="tq_service-run-"))) / "tokens.toml"
                entry = files.make_token(name="run", sha256=files.digest_of(token), roles=["admin"], prefixes=[""])
                files.append_token(path, entry)
                flags += ["--host", host, "--insecure", "--auth-tokens-file", str(path)]
            process = starting.enter_context(ServiceProcess(*flags, start_new_session=True))
            self._ending = starting.pop_all()
        return replace(run, address=process.address, token=token, is_service_owned=True)

    def run(self) -> Run:
        """Return the run, so that other processes can join it."""
        return self._run

    def get_config(self) -> Any:
        """Return the configuration of the run, as TransferQueue's actor does."""
        return self._run.filled_conf()

    def sample(self, batch_size: int, config: Config, **claim: Any) -> BatchMeta:
        """Let the sampler choose a batch, claim the samples that the sampler marks as consumed, and return the batch.

        Samplers may be stateful, so only one call runs at a time. Clearing a partition also clears the sampler's cache
        for it. The cache is also cleared once all the chosen samples have been cleared. Otherwise, the sampler would
        choose them again.

        Args:
            batch_size: number of samples in the batch.
            config: the `sampling_config` of the call.
            **claim: the arguments `partition_id`, `task_name` and `data_fields` of the claim.

        Returns:
            The batch, which is empty if the sampler chooses no samples or another consumer claims the chosen samples
            first.

        Raises:
            StorageKeyNotFoundError: some of the chosen samples were cleared.
        """
        sampler, partition_id, task_name = self._run.sampler, claim["partition_id"], claim["task_name"]
        with self._sampling:
            client = self._client = self._client or tq.Client(**self._run.client_options())
            known, _ = client.lookup_samples(partition_id, task_name=task_name, missing_ok=True)
            if known.consumed is None or not known.size:
                return BatchMeta()
            remembered = self._recall(client, partition_id, known.incarnation)
            produced, nothing = known.produced, np.zeros(known.size, np.bool_)
            is_ready = np.logical_and.reduce([produced.get(name, nothing) for name in claim["data_fields"]])
            ready = known.indexes[is_ready & ~known.consumed].tolist()
            tags = dict(zip(known.global_indexes, known.custom_meta, strict=True))

            def choose() -> Sampled:
                if len(ready) < batch_size and not sampler.has_cached_result(partition_id, task_name, config):
                    return [], []
                return sampler(ready, batch_size, partition=KnownPartition(partition_id, tags), **config)

            sampled, consumed = choose()
            if sampled and tags.keys().isdisjoint(sampled):
                # Indexes only increase. Therefore, if all stored indexes are higher than the highest chosen index, all
                # chosen samples have been cleared.
                is_over = min(tags) > remembered.last_given
                if is_over:
                    sampler.clear_cache(partition_id)
                sampled, consumed = choose() if is_over else ([], [])
            remembered.last_given = max([remembered.last_given, *sampled, *consumed])
            if cleared := set(sampled) - tags.keys():
                raise StorageKeyNotFoundError(
                    f"the sampler chose samples of partition {partition_id!r} that have been cleared: {sorted(cleared)}"
                )
            if not sampled or not _are_claimed(client, claim, config, consumed, known.incarnation):
                return BatchMeta()
            place_of = {index: place for place, index in enumerate(known.global_indexes)}
            return of_samples(known, claim["data_fields"]).select_samples(place_of[index] for index in sampled)

    def _recall(self, client: tq.Client, partition_id: str, incarnation: bytes) -> _Remembered:
        """Return the stored state of a partition.

        If the partition is new, first drop the state of partitions that no longer exist.
        """
        if partition_id not in self._remembered or self._remembered[partition_id].incarnation != incarnation:
            stored = {each.partition_id: each.incarnation for each in client.list_partitions()}
            for name in [name for name, each in self._remembered.items() if stored.get(name) != each.incarnation]:
                del self._remembered[name]
                self._run.sampler.clear_cache(name)
        return self._remembered.setdefault(partition_id, _Remembered(incarnation))

    def stop(self) -> None:
        """Close the controller's client, and stop the service if it was started for the run."""
        if self._client is not None:
            self._client.close()
        self._ending.close()

    @classmethod
    def options(cls, **options: Any) -> Any:
        """Return this class as a Ray actor class with the given options."""
        return sys.modules["ray"].remote(cls).options(**options)


def _are_claimed(
    client: tq.Client, claim: Mapping[str, Any], config: Config, rows: Indexes, incarnation: bytes
) -> bool:
    if not rows:
        return True
    # Replicas of a rank pass equal claim names, so they get the same samples. The name is never used for other samples.
    is_of_rank = config.get("dp_rank") is not None
    try:
        meta = client.get_meta(
            **claim,
            claim_name=f"{claim_name(config)}, samples from {min(rows)}" if is_of_rank else None,
            batch_size=len(rows),
            sampler="chosen",
            sampler_config={"rows": list(rows)},
            incarnation=incarnation,
            max_wait=0.0,
        )
    except (tq.errors.StaleIncarnationError, tq.errors.PartitionClearedError, tq.errors.PartitionNotFoundError):
        return False
    return meta.status == "batch"


def _flag(name: str, value: Any) -> list[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [] if value is None else [f"--{option}", str(value)]
