"""Weights that the trainer sends to the rollout workers, as rows of a separate partition.

Each version is one row with the flat parameters. Each rollout worker is a separate task, so it sees every version,
waits for the next one without polling, and keeps the newest. Versions that are too old for rollouts are cleared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

import tq_service as tq
from examples.demo.settings import WEIGHTS_PARTITION
from tq_service.errors import NotFoundError

FIELD = "parameters"
STOP_KEY = "stop"
KEPT_VERSIONS = 4
DRAIN_COUNT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One version of the policy's parameters: `flat` is `(parameters,)` float32."""

    version: int
    flat: Tensor


class WeightPublisher:
    """The trainer's side, which puts new versions and clears old ones."""

    def __init__(self, client: tq.Client) -> None:
        self._client = client

    def publish(self, version: int, flat: Tensor) -> None:
        """Publish a version to all rollout workers."""
        self._put(f"v{version}", version, flat)
        self._client.clear_samples(WEIGHTS_PARTITION, keys=[f"v{version - KEPT_VERSIONS}"])

    def stop(self, version: int, flat: Tensor) -> None:
        """Tell rollout and reward workers that no step will follow."""
        self._put(STOP_KEY, version, flat)

    def _put(self, key: str, version: int, flat: Tensor) -> None:
        self._client.put(
            WEIGHTS_PARTITION,
            {FIELD: flat.unsqueeze(0)},
            keys=[key],
            custom_meta=[{"version": version, "stop": key == STOP_KEY}],
        )


class WeightSubscriber:
    """A rollout worker's side: waits for a sufficiently new version.

    Attributes:
        stopped: whether the trainer is done.
    """

    def __init__(self, client: tq.Client, worker: int) -> None:
        self._client = client
        self._task = f"rollout_{worker}"
        self._latest: Weights | None = None
        self.stopped = False

    def wait_for(self, version: int) -> Weights | None:
        """Wait for weights of `version` or later and return the newest; None if the trainer is done."""
        self._take(max_wait=0.0)
        while not self.stopped and (self._latest is None or self._latest.version < version):
            self._take(max_wait=5.0)
        return None if self.stopped else self._latest

    def _take(self, max_wait: float) -> None:
        meta = self._client.claim(
            partition_id=WEIGHTS_PARTITION,
            task_name=self._task,
            data_fields=[FIELD],
            batch_size=DRAIN_COUNT,
            min_batch_size=1,
            max_wait=max_wait,
        )
        if meta.status != "batch":
            return
        self.stopped = any(row["stop"] for row in meta.custom_meta)
        newest = meta.select_samples([meta.size - 1])
        try:
            flat = self._client.get_data(newest)[FIELD][0]
        except NotFoundError:
            return  # cleared during this worker's rollout: newer ones exist
        self._latest = Weights(version=int(newest.custom_meta[0]["version"]), flat=flat)


def stop_check(client: tq.Client) -> Callable[[], bool]:
    """Return a function that checks whether the trainer is done, for a worker that does not read the weights."""

    def is_stopped() -> bool:
        try:
            found, _ = client.lookup_samples(WEIGHTS_PARTITION, keys=[STOP_KEY])
        except NotFoundError:
            return False
        return len(found.global_indexes) > 0

    return is_stopped
