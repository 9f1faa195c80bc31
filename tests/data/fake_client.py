"""An in-memory service with the semantics of ranked claims, and its sync client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tq_service.client.batch_meta import BatchMeta, Pack, Step
from tq_service.client.reads import object_stack

Row = dict[str, Any]


def token_rows(count: int, length: Callable[[int], int] = lambda index: index % 5) -> list[Row]:
    """Rows with a dense, two jagged and a text field, told apart by their index."""
    return [
        {
            "index": torch.tensor(index),
            "input_ids": torch.full((length(index),), index, dtype=torch.int32),
            "logprobs": torch.full((length(index),), float(index), dtype=torch.bfloat16),
            "text": f"sample {index}",
        }
        for index in range(count)
    ]


FIELDS = ["index", "input_ids", "logprobs", "text"]
JAGGED = {"input_ids": torch.int32, "logprobs": torch.bfloat16}
OBJECTS = {"text"}


@dataclass
class FakePartition:
    rows: list[Row] = field(default_factory=list)
    sealed: bool = False
    incarnation: bytes = b"incarnation 0"
    epoch: int = 0
    plans: dict[str, list[Any]] = field(default_factory=dict)
    consumed: dict[str, int] = field(default_factory=dict)


class FakeService:
    """Partitions that are put into by tests and claimed from by clients."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.partitions: dict[str, FakePartition] = {}
        self.waiting = threading.Event()
        self.claims: list[tuple[int, int]] = []  # first batch_index and batch_count of each call
        self.layouts: set[str | None] = set()
        self.open_client_count = 0
        self.cuts: Callable[[int, int], list[list[int]]] | None = None

    def put(self, partition_id: str, rows: list[Row], *, seal: bool = False) -> None:
        with self.changed:
            partition = self.partitions.setdefault(partition_id, FakePartition())
            partition.rows.extend(rows)
            partition.sealed = partition.sealed or seal
            self.changed.notify_all()

    def connect(self, address: str | None = None) -> FakeClient:
        return FakeClient(self)

    def plan(self, claim: dict[str, Any]) -> BatchMeta | None:
        partition = self.partitions.get(claim["partition_id"])
        if partition is None:
            return None
        plans = partition.plans.setdefault(claim["task_name"], [])
        while len(plans) <= claim["batch_index"]:
            if plans and plans[-1] == "end":
                break
            planned = self._next_plan(partition, claim)
            if planned is None:
                return None
            plans.append(planned)
        answer = plans[min(claim["batch_index"], len(plans) - 1)]
        if answer == "end":
            return BatchMeta(status="end", incarnation=partition.incarnation, epoch=partition.epoch)
        indexes, steps = answer[claim["dp_rank"]]
        return BatchMeta(
            status="batch",
            partition_id=claim["partition_id"],
            indexes=np.array(indexes, np.int64),
            steps=steps,
            incarnation=partition.incarnation,
            epoch=partition.epoch,
        )

    def _next_plan(self, partition: FakePartition, claim: dict[str, Any]) -> Any:
        dp_size, batch_size = claim["dp_size"], claim["batch_size"]
        start = partition.consumed.get(claim["task_name"], 0)
        ready = list(range(start, min(len(partition.rows), start + dp_size * batch_size)))
        no_more = partition.sealed or claim["finite"]
        if len(ready) < dp_size * batch_size and not no_more:
            return None
        if not ready or (claim["drop_last"] and len(ready) < dp_size * batch_size):
            return "end"
        partition.consumed[claim["task_name"]] = start + len(ready)
        parts = [ready[rank * batch_size : (rank + 1) * batch_size] for rank in range(dp_size)]
        size = claim["micro_batch_size"] or batch_size
        cut_count = max(-(-len(part) // size) for part in parts)
        cuts = self.cuts or (lambda n, _: [list(range(n))[at * size : (at + 1) * size] for at in range(cut_count)])
        return [
            (part, (Step(packs=tuple(Pack(positions=tuple(at)) for at in cuts(len(part), batch_size))),))
            for part in parts
        ]


class FakeClient:
    """The part of tq.Client that the loader calls."""

    def __init__(self, service: FakeService) -> None:
        self._service = service
        self._closed = False
        with service.changed:
            service.open_client_count += 1

    def get_meta(self, *, batch_count: int | None = None, **claim: Any) -> Any:
        with self._service.changed:
            self._service.claims.append((claim["batch_index"], batch_count or 1))
            first = self._claim(**claim)
            if batch_count is None:
                return first
            metas = [first]
            while len(metas) < batch_count and metas[-1].status == "batch":
                following = self._service.plan({**claim, "batch_index": claim["batch_index"] + len(metas)})
                if following is None:
                    break
                metas.append(following)
            return metas

    def _claim(self, *, max_wait: float, timeout: float, **claim: Any) -> BatchMeta:
        service = self._service
        deadline = time.monotonic() + max_wait
        with service.changed:
            while True:
                meta = service.plan(claim)
                if meta is not None:
                    return meta
                service.waiting.set()
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    return BatchMeta(status="not_yet")
                service.changed.wait(left)

    def get_data(self, meta: BatchMeta, *, timeout: float, layout: str | None = None) -> TensorDict:
        self._service.layouts.add(layout)
        rows = [self._service.partitions[meta.partition_id].rows[index] for index in meta.global_indexes]
        return batch_of(rows)

    def close(self) -> None:
        with self._service.changed:
            if not self._closed:
                self._closed = True
                self._service.open_client_count -= 1
                self._service.changed.notify_all()


def batch_of(rows: list[Row]) -> TensorDict:
    """Build a batch the way a client does, typed also without rows."""
    fields: dict[str, Any] = {}
    lengths = torch.tensor([0, *(len(row["input_ids"]) for row in rows)])
    offsets = lengths.cumsum(0)
    for name, dtype in JAGGED.items():
        values = torch.cat([torch.empty(0, dtype=dtype), *(row[name] for row in rows)])
        fields[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
    fields["index"] = torch.tensor([int(row["index"]) for row in rows], dtype=torch.int64)
    fields["text"] = object_stack([row["text"] for row in rows])
    return TensorDict(fields, batch_size=[len(rows)])


@dataclass(frozen=True)
class SealedRows:
    """A picklable client factory: a service of its own in each process, the same everywhere."""

    count: int
    partitions: tuple[str, ...] = ("train@0",)

    def __call__(self, address: str | None) -> FakeClient:
        service = FakeService()
        for number, partition_id in enumerate(self.partitions):
            rows = token_rows(self.count * (number + 1))[self.count * number :]
            service.put(partition_id, rows, seal=True)
        return service.connect()
