"""What each micro-batch of a rank had, noted as it comes: a restarted rank gets the batches of the dead one."""

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
    """Micro-batches that two processes of one rank were given.

    Attributes:
        count: how many.
        equal_count: of how many all bytes of all samples were the same.
        size_bytes: of the tensors of those that were equal.
    """

    count: int
    equal_count: int
    size_bytes: int


class BatchNotes:
    """The notes of one process of a rank; each is a line, written whole.

    Args:
        output: directory of the run.
        rank: the rank.
    """

    def __init__(self, output: Path, rank: int) -> None:
        self._file = notes_file(output, rank)

    def add(self, step: int, micro_batch: int, batch: Mapping[str, Any], meta: tq.BatchMeta) -> None:
        """Note a micro-batch, before anything is learned from it."""
        digest, size_bytes = hashlib.sha256(json.dumps(list(meta.global_indexes)).encode()), 0
        for name in sorted(batch.keys()):
            for row in rows_of(batch[name]):
                data = row.detach().numpy().tobytes()
                digest.update(data)
                size_bytes += len(data)
        note = {"process": os.getpid(), "step": step, "micro_batch": micro_batch, "size_bytes": size_bytes}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**note, "digest": digest.hexdigest()}) + "\n")


def notes_file(output: Path, rank: int) -> Path:
    """Return the file with the notes of a rank."""
    return output / f"batches_{rank}.jsonl"


def last_note(output: Path, rank: int) -> tuple[int, int]:
    """Return step and micro-batch of the last note of a rank, -1 for both where there is none yet."""
    notes = _read(output, rank)
    return (int(notes[-1]["step"]), int(notes[-1]["micro_batch"])) if notes else (-1, -1)


def redelivered(output: Path, rank: int) -> Redelivered:
    """Compare the micro-batches that more than one process of a rank was given."""
    first: dict[tuple[int, int], dict[str, Any]] = {}
    pairs = []
    for note in _read(output, rank):
        before = first.setdefault((note["step"], note["micro_batch"]), note)
        if before["process"] != note["process"]:
            pairs.append((before, note))
    equal = [after for before, after in pairs if before["digest"] == after["digest"]]
    return Redelivered(count=len(pairs), equal_count=len(equal), size_bytes=sum(note["size_bytes"] for note in equal))


def _read(output: Path, rank: int) -> list[dict[str, Any]]:
    """Return the notes of a rank; a last line that a killed process has not finished is left out."""
    try:
        text = notes_file(output, rank).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
