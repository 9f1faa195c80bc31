"""A replay buffer that knows the tags of all samples without listing them: a watch keeps them up to date.

A trainer that polls for finished prompts every two seconds lists all tags each time, even if nothing has changed.
`FollowedTags` keeps them locally, and each change is sent once. After a connection failure, the watch resumes at the
same position. After a restart of the service, the watch starts again from the beginning.

Start a service with `tq-service serve`, then run `python examples/follow_tags.py`. Set TQ_ADDRESS if the service has
another address.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

import tq_service as tq
from tq_service.types import PartitionUpdate, WatchUpdate

PARTITION = "replay"
PROMPTS = 2_000
FINISHED_A_ROUND = 20
ROUNDS = 10

Tags = dict[str, dict[str, Any]]


class FollowedTags:
    """The tags of all samples with keys, by partition and key; a thread updates them inside a `with` block.

    Args:
        client: client of the service.
        prefix: prefix of the partition names.
    """

    def __init__(self, client: tq.Client, prefix: str = "") -> None:
        self._watch = client.watch(prefix, tasks=False)
        self._tags: dict[str, Tags] = {}
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._is_current = False
        self._thread = threading.Thread(target=self._follow, name="follow-tags", daemon=True)
        self.received_count = 0  # samples that were sent

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_for(lambda _tags: True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.close()
        self._thread.join()

    def wait_for(self, is_enough: Callable[[dict[str, Tags]], bool], timeout: float = 30.0) -> bool:
        """Wait until the tags satisfy a condition, which is checked after each change. Return False on timeout."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: self._failure is not None or (self._is_current and is_enough(self._tags)), timeout
            )
            if self._failure is not None:
                raise self._failure
            return found

    def of(self, partition_id: str) -> Tags:
        """Return a copy of a partition's tags, by key."""
        with self._changed:
            return dict(self._tags.get(partition_id, {}))

    def _follow(self) -> None:
        parts: list[WatchUpdate] = []
        try:
            for update in self._watch:
                parts.append(update)
                if update.revision is not None:  # else more parts of this update follow
                    with self._changed:
                        for part in parts:
                            self._apply(part)
                        self._is_current = True
                        self._changed.notify_all()
                    parts.clear()
        except Exception as failure:  # raised in `wait_for`, such as an outage longer than the timeout
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _apply(self, update: WatchUpdate) -> None:
        if update.is_reset:
            self._tags.clear()
        for each in update.partitions:
            if each.cleared:
                self._tags.pop(each.partition_id, None)
            else:
                self._apply_to(self._tags.setdefault(each.partition_id, {}), each)

    def _apply_to(self, tags: Tags, update: PartitionUpdate) -> None:
        for key in update.cleared_keys:
            tags.pop(key or "", None)
        if update.samples is not None:
            named = zip(update.samples.keys, update.samples.custom_meta, strict=True)
            tags.update((key, tag) for key, tag in named if key is not None)
            self.received_count += update.samples.size


def roll_out() -> None:
    """Finish some prompts from time to time."""
    rng = np.random.default_rng(0)
    running = list(range(PROMPTS))
    with tq.Client() as client:
        for _ in range(ROUNDS):
            finished = [running.pop(rng.integers(len(running))) for _ in range(FINISHED_A_ROUND)]
            client.put(
                PARTITION,
                {"response": [np.arange(1 + number % 7) for number in finished]},
                keys=[f"prompt-{number}" for number in finished],
                custom_meta=[{"status": "finished", "length": 1 + number % 7} for number in finished],
                key_mode="existing",
            )
            time.sleep(0.05)


def main() -> None:
    """Train on prompts as they are finished."""
    with tq.Client() as client:
        keys = np.array([f"prompt-{number}" for number in range(PROMPTS)])
        client.put(PARTITION, keys=keys, custom_meta=[{"status": "running"}] * PROMPTS, state="held")
        with FollowedTags(client, PARTITION) as tags:
            rollouts = threading.Thread(target=roll_out)
            rollouts.start()
            trained: set[str] = set()
            while len(trained) < ROUNDS * FINISHED_A_ROUND:

                def finished(all_tags: dict[str, Tags]) -> list[str]:
                    found = all_tags.get(PARTITION, {}).items()
                    return [key for key, tag in found if tag["status"] == "finished" and key not in trained]

                if not tags.wait_for(lambda all_tags: len(finished(all_tags)) >= FINISHED_A_ROUND):
                    raise TimeoutError("timed out waiting for finished prompts")
                batch = finished({PARTITION: tags.of(PARTITION)})[:FINISHED_A_ROUND]
                client.get_data(PARTITION, keys=batch, data_fields=["response"])  # a training step here
                trained.update(batch)
            rollouts.join()
            client.clear_samples(PARTITION, keys=sorted(trained))
            tags.wait_for(lambda all_tags: len(all_tags[PARTITION]) == PROMPTS - len(trained))
            listed, _ = client.lookup_samples(PARTITION)
            is_equal = tags.of(PARTITION) == dict(zip(listed.keys, listed.custom_meta, strict=True))
            print(f"trained on {len(trained)} of {PROMPTS} prompts; followed tags equal listed ones: {is_equal}")
            print(f"samples received: {tags.received_count}; a list after each step has {ROUNDS * PROMPTS}")
        client.clear_partition(PARTITION)


if __name__ == "__main__":
    main()
