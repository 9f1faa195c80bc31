"""What the adapter needs of NeMo-RL, which is not installed for tests: the names and signatures of its interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class KVBatchMeta:
    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.tags is not None and len(self.tags) != len(self.sample_ids):
            raise ValueError("one tag a sample")


class DataPlaneClient(ABC):
    @abstractmethod
    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None: ...

    @abstractmethod
    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta: ...

    @abstractmethod
    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> Any: ...

    @abstractmethod
    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool: ...

    @abstractmethod
    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: Any = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta: ...

    @abstractmethod
    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> Any: ...

    @abstractmethod
    def list_sample_ids(self, partition_id: str) -> list[str]: ...

    @abstractmethod
    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None: ...

    @abstractmethod
    def save_checkpoint(self, checkpoint_dir: str | Path, *, metadata: dict[str, Any] | None = None) -> None: ...

    @abstractmethod
    def load_checkpoint(self, checkpoint_dir: str | Path) -> dict[str, Any]: ...

    @abstractmethod
    def close(self) -> None: ...
