"""TransferQueue's samplers. The service implements the built-in samplers. The run's controller calls custom samplers.

A custom sampler is a subclass of `BaseSampler`. Its method `sample` is called for one batch at a time. In a Ray
cluster, the actor shared by all processes of the run calls `sample`. Otherwise, the process that requests the batch
calls `sample`.
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
    """Base class of samplers. A sampler chooses which samples to return as a batch and which to consume.

    `_states` stores the sampler's choices by partition, task, rank and batch until the partition is cleared, so that a
    rank can repeat a request.
    """

    claim: ClassVar[Callable[[Any, int, Config], dict[str, Any]] | None] = None
    """Method that returns arguments for the client's `get_meta`. None if the service does not implement the sampler."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, dict[Any, dict[Any, Any]]]] = {}

    @abstractmethod
    def sample(self, ready_indexes: Indexes, batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        """Return the samples of a batch and the samples to consume, or two empty lists if too few samples are ready.

        Args:
            ready_indexes: indexes of the task's unconsumed samples that have all requested fields.
            batch_size: number of samples in the batch.
            *args: unused.
            **kwargs: `partition`, an object with the attribute `partition_id` and the method
                `get_custom_meta(indexes)`, which returns a dict that maps sample indexes to custom_meta. `task_name`,
                `partition_id`, `dp_rank` and `batch_index` are also passed if they are in the call's `sampling_config`.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Sampled:
        """Call `sample`."""
        return self.sample(*args, **kwargs)

    def has_cached_result(self, partition_id: str, task_name: str, sampling_config: Config | None = None) -> bool:
        """Return whether `_states` already contains the batch that a rank requests."""
        config = sampling_config or {}
        known = self._states.get(partition_id, {}).get(task_name, {}).get(config.get("dp_rank"), {})
        return config.get("batch_index") in known

    def clear_cache(self, partition_id: str) -> None:
        """Discard the choices stored for a partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """Return the state to pass to `load_checkpoint`."""
        return {"_states": self._states}

    def load_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `save_checkpoint`."""
        self._states = state["_states"]

    def _batches(self, partition_id: str, task_name: str, dp_rank: Any) -> dict[Any, Sampled]:
        """Return the dict of a rank's stored choices, keyed by batch index."""
        tasks = self._states.setdefault(partition_id, {})
        return tasks.setdefault(task_name, {}).setdefault(dp_rank, {})

    def _recalled(self, batches: dict[Any, Sampled], batch_index: Any, choose: Callable[[], Indexes]) -> Sampled:
        """Return the stored choice for a batch, or make and store one.

        If no choice is possible, return two empty lists.
        """
        if batch_index not in batches and (chosen := choose()):
            batches[batch_index] = chosen, list(chosen)
        sampled, consumed = batches.get(batch_index, ((), ()))
        return list(sampled), list(consumed)


class SequentialSampler(BaseSampler):
    """A sampler that chooses ready samples in the order in which it receives them."""

    def claim(self, batch_size: int, config: Config) -> dict[str, Any]:
        """Return the `get_meta` arguments for claiming the next samples."""
        return {"batch_size": batch_size}

    def sample(self, ready_indexes: Indexes, batch_size: int, *args: Any, **kwargs: Any) -> Sampled:
        """Return up to `batch_size` ready samples, in the order of `ready_indexes`."""
        return ready_indexes[:batch_size], ready_indexes[:batch_size]


class RankAwareSampler(BaseSampler):
    """A sampler that gives each requesting rank the next samples that are ready.

    All replicas of a rank get the same samples.
    """

    def claim(self, batch_size: int, config: Config) -> dict[str, Any]:
        """Return the `get_meta` arguments for claiming the next samples. Repeated requests return the same samples."""
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
        """Return the first `batch_size` ready samples. If the rank repeats its request, return its previous samples.

        Raises:
            ValueError: `dp_rank` is missing or negative, or `batch_index` is missing.
        """
        claim_name({"dp_rank": dp_rank, "batch_index": batch_index})
        batches = self._batches(partition_id, task_name, dp_rank)
        chosen = ready_indexes[:batch_size] if len(ready_indexes) >= batch_size else []
        return self._recalled(batches, batch_index, lambda: chosen)


class GRPOGroupNSampler(BaseSampler):
    """A sampler that chooses complete groups of samples with consecutive indexes.

    Args:
        n_samples_per_prompt: group size.
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt < 1:
            raise ValueError(f"n_samples_per_prompt is {n_samples_per_prompt}; expected at least 1")
        self.n_samples_per_prompt = n_samples_per_prompt

    def claim(self, batch_size: int, config: Config) -> dict[str, Any]:
        """Return the `get_meta` arguments that claim complete groups. Repeated requests return the same groups."""
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
        """Return complete groups, sorted by index. If a rank repeats its request, return its previous groups.

        Raises:
            ValueError: `batch_size` is not a multiple of the group size.
        """
        if kwargs.get("dp_rank") is None:
            taken = self._take_groups(ready_indexes, batch_size)
            return taken, list(taken)
        batches = self._batches(partition_id, task_name, kwargs["dp_rank"])
        return self._recalled(batches, kwargs.get("batch_index"), lambda: self._take_groups(ready_indexes, batch_size))

    def _take_groups(self, ready_indexes: Indexes, count: int) -> Indexes:
        if count % self.n_samples_per_prompt:
            raise ValueError(f"batch_size is {count}; expected a multiple of n_samples_per_prompt ({self._groups()})")
        taken: Indexes = []
        run: Indexes = []
        for index in sorted(ready_indexes):  # groups are runs of consecutive indexes
            run = [*run, index] if run and index == run[-1] + 1 else [index]
            if len(run) == self.n_samples_per_prompt:
                taken += run
                run = []
        return taken[:count] if len(taken) >= count else []


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """A sampler that chooses complete groups for all ranks at once and balances their token counts.

    The token count of a sample is the value of `total_lengths` in its custom_meta.

    Args:
        n_samples_per_prompt: number of samples per group.
        dp_size: number of ranks.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size < 1:
            raise ValueError(f"dp_size is {dp_size}; expected at least 1")
        self.dp_size = dp_size

    def claim(self, batch_size: int, config: Config) -> dict[str, Any]:
        """Return the `get_meta` arguments that claim the rank's share of a batch planned for all ranks."""
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
        """Return the requesting rank's share of the samples. Store the shares of the other ranks for later requests."""
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
            _log.warning(
                "SeqlenBalancedSampler received no partition, so it could not balance token counts; each rank gets the "
                "same number of samples"
            )
            return [taken[at : at + batch_size] for at in range(0, len(taken), batch_size)]
        groups = [taken[at : at + self.n_samples_per_prompt] for at in range(0, len(taken), self.n_samples_per_prompt)]
        known = partition.get_custom_meta(taken)
        tokens = [sum(known.get(index, {}).get("total_lengths", 1) for index in group) for group in groups]
        shares = get_seqlen_balanced_partitions(tokens, self.dp_size, equal_size=True)
        return [[index for group in share for index in groups[group]] for share in shares]


def service_samples(sampler: BaseSampler) -> bool:
    """Return whether the service implements the sampler. The service implements only the four built-in samplers."""
    return type(sampler) in (SequentialSampler, RankAwareSampler, GRPOGroupNSampler, SeqlenBalancedSampler)


def claim_name(config: Config) -> str:
    """Return the name of a rank's claim on a batch.

    Raises:
        ValueError: `dp_rank` is missing or negative, or `batch_index` is missing.
    """
    rank, batch = config.get("dp_rank"), config.get("batch_index")
    if rank is None or batch is None or rank < 0:
        raise ValueError(
            f"sampling_config contains dp_rank {rank} and batch_index {batch}; expected a dp_rank of at least 0 and a "
            "batch_index other than None"
        )
    return f"rank {rank}, batch {batch}"
