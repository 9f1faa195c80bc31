"""Records of each micro-batch a rank receives, to check that a restarted rank gets the dead one's batches."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tq_service as tq
from examples.demo.tensors import rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Redelivered:
    """Micro-batches that two processes of one rank received.

    Attributes:
        count: number of micro-batches.
        equal_count: number of micro-batches with identical bytes in all samples.
        size_bytes: total size of the tensors in the identical micro-batches.
    """

    count: int
    equal_count: int
    size_bytes: int


class BatchNotes:
    """The notes of one process of a rank. Each note is one line, and is written immediately.

    Args:
        output: directory of the run.
        rank: the rank.
    """

    def __init__(self, output: Path, rank: int) -> None:
        self._file = notes_file(output, rank)

    def add(self, step: int, micro_batch: int, batch: Mapping[str, Any], meta: tq.BatchMeta) -> None:
        """Record a micro-batch, before training on it."""
        digest, size_bytes = digest_of(batch, meta)
        note = {"process": os.getpid(), "step": step, "micro_batch": micro_batch, "size_bytes": size_bytes}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**note, "digest": digest}) + "\n")


def digest_of(batch: Mapping[str, Any], meta: tq.BatchMeta) -> tuple[str, int]:
    """Return a digest of samples (metadata and all bytes of their tensors), and the number of these bytes."""
    samples = [list(meta.global_indexes), meta.keys, meta.groups, meta.custom_meta]
    digest, size_bytes = hashlib.sha256(json.dumps(samples).encode()), 0
    for name in sorted(batch.keys()):
        for row in rows_of(batch[name]):
            data = row.detach().numpy().tobytes()
            digest.update(data)
            size_bytes += len(data)
    return digest.hexdigest(), size_bytes


def notes_file(output: Path, rank: int) -> Path:
    """Return the file with the notes of a rank."""
    return output / f"batches_{rank}.jsonl"


def last_note(output: Path, rank: int) -> tuple[int, int]:
    """Return the step and micro-batch of a rank's last note, or -1 for both if there are no notes."""
    notes = _read(output, rank)
    return (int(notes[-1]["step"]), int(notes[-1]["micro_batch"])) if notes else (-1, -1)


def redelivered(output: Path, rank: int) -> Redelivered:
    """Compare the micro-batches that more than one process of a rank received."""
    first: dict[tuple[int, int], dict[str, Any]] = {}
    pairs = []
    for note in _read(output, rank):
        before = first.setdefault((note["step"], note["micro_batch"]), note)
        if before["process"] != note["process"]:
            pairs.append((before, note))
    equal = [after for before, after in pairs if before["digest"] == after["digest"]]
    return Redelivered(count=len(pairs), equal_count=len(equal), size_bytes=sum(note["size_bytes"] for note in equal))


def _read(output: Path, rank: int) -> list[dict[str, Any]]:
    """Return the notes of a rank, except an incomplete last line left by a killed process."""
    try:
        text = notes_file(output, rank).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
