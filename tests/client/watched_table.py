"""What a watch says of partitions, applied as docs/protocol.md has it, and the same as lists say it."""

from __future__ import annotations

from typing import Any

from client_support import next_update

import tq_service as tq


class WatchedTable:
    """Partitions, samples and tasks as the updates of a watch leave them."""

    def __init__(self) -> None:
        self.summaries: dict[str, Any] = {}
        self.samples: dict[str, dict[int, Any]] = {}
        self.tasks: dict[str, dict[str, Any]] = {}
        self.revision: Any = None
        self.reset_count = 0

    def apply(self, update: Any) -> None:
        if update.is_reset:
            self.summaries, self.samples, self.tasks = {}, {}, {}
            self.reset_count += 1
        for each in update.partitions:
            name, known = each.partition_id, self.summaries.get(each.partition_id)
            if each.cleared:
                if known is not None and known.incarnation == each.incarnation:
                    del self.summaries[name], self.samples[name], self.tasks[name]
                continue
            assert known is None or known.incarnation == each.incarnation, "a partition was made again without a word"
            if each.summary is not None:
                self.summaries[name] = each.summary
            samples, tasks = self.samples.setdefault(name, {}), self.tasks.setdefault(name, {})
            for index in each.cleared_indexes.tolist():
                samples.pop(index, None)
            if each.samples is not None:
                samples.update(rows_of(each.samples))
            tasks.update((task.task_name, progress_of(task)) for task in each.tasks)
        if update.revision is not None:
            self.revision = update.revision

    async def follow(self, watch: Any, until: Any) -> None:
        """Apply updates until those of a revision, or a later one, are whole."""
        while self.revision is None or self.revision.number < until.number:
            update = await next_update(watch)
            assert update is not None, "the watch has ended"
            self.apply(update)

    def state(self) -> dict[str, Any]:
        return {
            name: (summary, self.samples[name], self.tasks[name]) for name, summary in sorted(self.summaries.items())
        }


def rows_of(meta: tq.BatchMeta) -> dict[int, Any]:
    """Return what is known of samples, by index."""
    columns = zip(meta.keys, meta.groups, meta.custom_meta, strict=True)
    produced = [{name for name, has in meta.produced.items() if has[place]} for place in range(meta.size)]
    return dict(zip(meta.global_indexes, zip(columns, produced, strict=True), strict=True))


def progress_of(task: Any) -> tuple[Any, ...]:
    return (
        task.epoch, task.consumed_count, task.skipped_count, task.planned_batch_count, task.dp_size, task.leased_count,
        task.dead_lettered_count, task.complete,
    )  # fmt: skip


async def listed_state(client: Any, prefix: str = "") -> dict[str, Any]:
    """Return the state as lists have it."""
    state = {}
    for summary in await client.list_partitions(prefix):
        meta, _ = await client.lookup_samples(summary.partition_id)
        described = await client.describe_partition(summary.partition_id)
        tasks = {task.task_name: progress_of(task) for task in described.tasks}
        state[summary.partition_id] = (summary, rows_of(meta), tasks)
    return state
