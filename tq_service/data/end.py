"""What a loader warns of at the end of a partition: the samples that its task did not get, and why."""

from __future__ import annotations

from tq_service.data.batch import End
from tq_service.data.source import BatchRequest
from tq_service.errors import NothingDeliveredError
from tq_service.schema import EndCounts


def end_warning(end: End, request: BatchRequest) -> str | None:
    """Return what to warn of: samples that were skipped, unless they were cleared, or kept from earlier epochs.

    Cleared ones are nothing to warn of: in a partition that lives for weeks, a task that comes late never gets most of
    them. Only what is the same for all ranks decides, so that all of them raise or none: the counts of the recorded
    end, never what this rank got. What the task consumed before this loader began is in them too, so that a restart
    behind the last batch is not an error.

    Raises:
        NothingDeliveredError: samples were inserted, and the task was given none.
    """
    counts = end.counts
    if counts is None or not (counts.skipped_count or counts.kept_count):
        return None
    why = "; ".join(_reasons(counts, request))
    if not counts.consumed_count and not counts.dead_lettered_count:
        raise NothingDeliveredError(
            f"task {request.task_name!r} is at the end of partition {request.partition_id!r} without one sample, "
            f"on all ranks; its {counts.skipped_count} samples were skipped: {why}",
            metadata={
                "partition_id": request.partition_id,
                "task_name": request.task_name,
                **{name: str(count) for name, count in counts.skipped_counts.items()},
            },
        )
    texts = [] if counts.skipped_count == counts.cleared_count else [f"{counts.skipped_count} were skipped: {why}"]
    if counts.kept_count:
        texts.append(
            f"{counts.kept_count} of them in earlier epochs, which reset_consumption(keep_consumed=True) does not "
            "deliver again: batches that a loader had fetched ahead and not handed out may be among them. To train on "
            "these, clear what was trained and reset without keep_consumed"
        )
    if not texts:
        return None
    return (
        f"task {request.task_name!r} is at the end of partition {request.partition_id!r}: {counts.consumed_count} "
        f"samples were consumed, {'; '.join(reversed(texts))}"
    )


def _reasons(counts: EndCounts, request: BatchRequest) -> list[str]:
    whole = request.batch_size * request.dp_size
    left_over = (
        f"left over by drop_last, or by the sampler {request.sampler!r}; a batch of all ranks has {whole} "
        f"{request.batch_unit}s"
        if request.drop_last
        else f"ready, but in no plan of the sampler {request.sampler!r}"
    )
    where = f"where={list(request.where)}" if request.where else "the where that fetch_batch_fn gave"
    texts = {
        "in_incomplete_groups_count": "in groups that are not whole (a member is missing, failed, cleared or ruled "
        "out; put as many as group_size says, or let the sampler's incomplete_groups='take' take the rest)",
        "excluded_count": f"ruled out by {where}",
        "overlong_count": "longer than the sampler's limit of tokens, which overlong='drop' leaves out",
        "left_over_count": left_over,
        "failed_count": "failed",
        "cleared_count": "cleared before the task took them",
        "dead_lettered_count": "delivered too often without being acknowledged",
    }
    skipped = counts.skipped_counts
    return [f"{skipped[name]} {text}" for name, text in texts.items() if name in skipped]
