"""TransferQueue's samplers. For the four of these names the service samples; those of users run where `init` did.

A sampler of users is a subclass of `BaseSampler` with `sample`. It is called for one batch at a time: in a Ray cluster
by the actor that all processes of a run know, else in the process that asks.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from tq_service.balancing import get_seqlen_balanced_partitions

Indexes = list[int]
Sampled = tuple[Indexes, Indexes]
Config = Mapping[str, Any]

_log = logging.getLogger(__name__)


class BaseSampler(ABC):
    """Chooses the samples of a batch, and which of them, or which others, are consumed by it.

    `_states` holds the choices by partition, task, rank and batch, for ranks that ask again, until the partition is
    cleared.
    """

    claim: ClassVar[Callable[[Any, int, Config], dict[str, Any]] | None] = None
    """Makes the arguments of the service's `get_meta`, where the service samples."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, dict[Any, dict[Any, Any]]]] = {}

    @abstractmethod
    def sample(self, ready_indexes: Indexes, batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        """Return the samples of a batch, and those that the task has consumed with it; none where too few are ready.

        Args:
            ready_indexes: samples that have all fields asked for, and that the task has not consumed.
            batch_size: how many are asked for.
            *args: none.
            **kwargs: `partition`, with a `partition_id` and `get_custom_meta(indexes)`, a dict for each sample that has
                some, and the `sampling_config` of the call: `task_name`, `partition_id`, `dp_rank`, `batch_index`, as
                far as it is given.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Sampled:
        """Do what `sample` does."""
        return self.sample(*args, **kwargs)

    def has_cached_result(self, partition_id: str, task_name: str, sampling_config: Config | None = None) -> bool:
        """Return whether `_states` has what a rank asks for again."""
        config = sampling_config or {}
        known = self._states.get(partition_id, {}).get(task_name, {}).get(config.get("dp_rank"), {})
        return config.get("batch_index") in known

    def clear_cache(self, partition_id: str) -> None:
        """Forget a partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """Return what `load_checkpoint` takes."""
        return {"_states": self._states}

    def load_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Go on from what `save_checkpoint` returned."""
        self._states = state["_states"]

    def _batches(self, partition_id: str, task_name: str, dp_rank: Any) -> dict[Any, Sampled]:
        """Return the choices for a rank by batch."""
        tasks = self._states.setdefault(partition_id, {})
        return tasks.setdefault(task_name, {}).setdefault(dp_rank, {})

    def _recalled(self, batches: dict[Any, Sampled], batch_index: Any, choose: Callable[[], Indexes]) -> Sampled:
        """Return the choice for a batch: that of before where the rank asks again, else a new one if there is one."""
        if batch_index not in batches and (chosen := choose()):
            batches[batch_index] = chosen, list(chosen)
        sampled, consumed = batches.get(batch_index, ((), ()))
        return list(sampled), list(consumed)


class SequentialSampler(BaseSampler):
    """Takes the first samples that are ready."""

    def claim(self, batch_size: int, config: Config) -> dict[str, Any]:
        """Return what asks the service for the next samples."""
        return {"batch_size": batch_size}

    def sample(self, ready_indexes: Indexes, batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        """Return the first samples, fewer where fewer are ready."""
        return ready_indexes[:batch_size], ready_indexes[:batch_size]


class RankAwareSampler(BaseSampler):
    """Gives each rank the next samples for each of its batches, and the replicas of a rank the same ones."""

    def claim(self, batch_size: int, config: Config) -> dict[str, Any]:
        """Return what asks the service for the next samples, the same whenever this rank asks for this batch."""
        return {"batch_size": batch_size, "claim_name": claim_name(config)}

    def sample(
        self,
        ready_indexes: Indexes,
        batch_size: int,
        dp_rank: int | None = None,
        batch_index: int | None = None,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Sampled:
        """Return the first samples, those of before where the rank asks again.

        Raises:
            ValueError: the rank is negative, or it or the batch is missing.
        """
        claim_name({"dp_rank": dp_rank, "batch_index": batch_index})
        batches = self._batches(partition_id, task_name, dp_rank)
        chosen = ready_indexes[:batch_size] if len(ready_indexes) >= batch_size else []
        return self._recalled(batches, batch_index, lambda: chosen)


class GRPOGroupNSampler(BaseSampler):
    """Takes whole groups of n consecutive samples.

    Args:
        n_samples_per_prompt: n.
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt < 1:
            raise ValueError(f"n_samples_per_prompt is {n_samples_per_prompt}, expected at least 1")
        self.n_samples_per_prompt = n_samples_per_prompt

    def claim(self, batch_size: int, config: Config) -> dict[str, Any]:
        """Return what asks the service for whole groups, the same ones where a rank asks again."""
        named = {} if config.get("dp_rank") is None else {"claim_name": claim_name(config)}
        return {"batch_size": batch_size, "sampler": "grpo_group_n", "sampler_config": self._groups(), **named}

    def _groups(self) -> dict[str, Any]:
        return {"n_samples_per_prompt": self.n_samples_per_prompt, "blocks": "anywhere"}

    def sample(
        self,
        ready_indexes: Indexes,
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Sampled:
        """Return whole groups in the order of their indexes, those of before where a rank asks again.

        Raises:
            ValueError: `batch_size` does not hold whole groups.
        """
        if kwargs.get("dp_rank") is None:
            taken = self._take_groups(ready_indexes, batch_size)
            return taken, list(taken)
        batches = self._batches(partition_id, task_name, kwargs["dp_rank"])
        return self._recalled(batches, kwargs.get("batch_index"), lambda: self._take_groups(ready_indexes, batch_size))

    def _take_groups(self, ready_indexes: Indexes, count: int) -> Indexes:
        if count % self.n_samples_per_prompt:
            raise ValueError(f"batch_size is {count}, expected a multiple of n_samples_per_prompt, {self._groups()}")
        taken: Indexes = []
        run: Indexes = []
        for index in sorted(ready_indexes):  # groups are of consecutive indexes, from the lowest on
            run = [*run, index] if run and index == run[-1] + 1 else [index]
            if len(run) == self.n_samples_per_prompt:
                taken += run
                run = []
        return taken[:count] if len(taken) >= count else []


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Takes whole groups for all ranks at once, and gives each of them as many tokens as the others (`total_lengths`).

    Args:
        n_samples_per_prompt: samples of a group.
        dp_size: number of ranks.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size < 1:
            raise ValueError(f"dp_size is {dp_size}, expected at least 1")
        self.dp_size = dp_size

    def claim(self, batch_size: int, config: Config) -> dict[str, Any]:
        """Return what asks the service for this rank's share of a batch that it plans for all."""
        place = {"dp_rank": config.get("dp_rank") or 0, "batch_index": config.get("batch_index") or 0}
        return {
            "batch_size": batch_size, "sampler": "seqlen_balanced", "sampler_config": self._groups(),
            "dp_size": self.dp_size, **place,
        }  # fmt: skip

    def sample(
        self,
        ready_indexes: Indexes,
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Sampled:
        """Return the share of the rank that asks; that of the others is remembered until they do."""
        rank, batch_index = kwargs.get("dp_rank") or 0, kwargs.get("batch_index") or 0
        batches = self._batches(partition_id, task_name, rank)
        if batch_index not in batches:
            for each, share in enumerate(self._shares(ready_indexes, batch_size, kwargs.get("partition"))):
                self._batches(partition_id, task_name, each)[batch_index] = share, list(share)
        return self._recalled(batches, batch_index, list)

    def _shares(self, ready_indexes: Indexes, batch_size: int, partition: Any) -> list[Indexes]:
        taken = self._take_groups(ready_indexes, batch_size * self.dp_size)
        if not taken:
            return []
        if partition is None:
            _log.warning("SeqlenBalancedSampler was given no partition; the ranks get equal parts in their order")
            return [taken[at : at + batch_size] for at in range(0, len(taken), batch_size)]
        groups = [taken[at : at + self.n_samples_per_prompt] for at in range(0, len(taken), self.n_samples_per_prompt)]
        known = partition.get_custom_meta(taken)
        tokens = [sum(known.get(index, {}).get("total_lengths", 1) for index in group) for group in groups]
        shares = get_seqlen_balanced_partitions(tokens, self.dp_size, equal_size=True)
        return [[index for group in share for index in groups[group]] for share in shares]


def service_samples(sampler: BaseSampler) -> bool:
    """Return whether the service samples for it: it is one of the four, and none that a user has derived from them."""
    return type(sampler) in (SequentialSampler, RankAwareSampler, GRPOGroupNSampler, SeqlenBalancedSampler)


def claim_name(config: Config) -> str:
    """Return the name of what a rank claims for a batch.

    Raises:
        ValueError: it says not which.
    """
    rank, batch = config.get("dp_rank"), config.get("batch_index")
    if rank is None or batch is None or rank < 0:
        raise ValueError(f"sampling_config has dp_rank {rank} and batch_index {batch}; expected both, from 0 on")
    return f"rank {rank}, batch {batch}"
