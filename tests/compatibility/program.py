"""Runs with the client of either version: `write ADDRESS`, `read ADDRESS`, or `exchange ADDRESS`.

`write` makes partitions, claims and versions. `read` prints as JSON what is left of them, and what the next claims get.
`exchange` prints what calls with large and small data return. PYTHONPATH decides which version of tq_service it uses.
"""

from __future__ import annotations

import json
import sys
from typing import Any

sys.modules["torch"] = None  # type: ignore[assignment]  # numpy suffices, and torch takes seconds to import

import numpy as np

import tq_service as tq

ROWS = 8
LENGTHS = [5, 3, 8, 2, 4, 4, 9, 1]
TILED_BYTES = 2**18  # has a file of its own in a data directory
LARGE_BYTES = 2**22  # goes over a bulk connection or shared memory
TRAIN = {
    "partition_id": "train", "task_name": "update_actor", "data_fields": ["input_ids", "reward"], "batch_size": 2,
    "sampler": "seqlen_balanced", "sampler_config": {"n_samples_per_prompt": 2}, "dp_size": 2, "max_wait": 0.0,
}  # fmt: skip
QUEUE = {"partition_id": "train", "task_name": "reward_model", "data_fields": ["text"], "max_wait": 0.0, "lease": 86400}
NAMED = {"partition_id": "train", "task_name": "by_name", "data_fields": ["pixels"], "batch_size": 2, "max_wait": 0.0}


def write(client: Any) -> None:
    """Fill a service."""
    client.create_partition("train", fields=[tq.FieldSpec("input_ids", layout="jagged")])
    samples = client.put(
        "train",
        {
            "input_ids": [np.arange(length) for length in LENGTHS],
            "pixels": np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 2, 2),
            "text": [f"answer {row}" for row in range(ROWS)],
        },
        keys=[f"k{row}" for row in range(ROWS)],
        groups=[f"g{row // 2}" for row in range(ROWS)],
        group_size=2,
        custom_meta=[
            {"total_lengths": length, "tag": f"t{row}", "any": {"row": [row, None]}, "score": row / 4}
            for row, length in enumerate(LENGTHS)
        ],
    )
    client.put(samples, {"reward": np.arange(ROWS, dtype=np.float32)})
    client.insert("train", 2, keys=["h0", "h1"], state="held")
    for dp_rank in range(2):
        client.get_meta(**TRAIN, dp_rank=dp_rank, batch_index=0)
    client.ack(client.get_meta(**QUEUE, batch_size=2))
    client.get_meta(**QUEUE, batch_size=2, claim_name="unfinished")
    client.get_meta(**NAMED, claim_name="first")
    client.put("tiled", {"x": tiled(TILED_BYTES)})
    client.publish_version(3, policy="policy")
    client.checkpoint("all")
    client.set_custom_meta(samples, [{"late": row} for row in range(ROWS)])
    client.clear_samples("train", keys=["h1"])
    client.seal_partition("train")


def read(client: Any) -> dict[str, Any]:
    """Return the samples, the claims of before and the next ones."""
    found, missing = client.lookup_samples("train")
    ranks = {
        f"batch {index}, rank {dp_rank}": described(client.get_meta(**TRAIN, dp_rank=dp_rank, batch_index=index))
        for index in (0, 1, 2)
        for dp_rank in range(2)
    }
    keys = [f"k{row}" for row in range(ROWS)]
    tiled_meta, _ = client.lookup_samples("tiled")
    return {
        "samples": {
            "indexes": found.global_indexes, "keys": found.keys, "groups": found.groups, "missing": missing,
            "custom_meta": found.custom_meta,
            "data": plain(client.get_data("train", keys=keys)),
        },
        "ranks": ranks,
        "queue": {
            "unfinished": described(client.get_meta(**QUEUE, batch_size=2, claim_name="unfinished")),
            "next": described(client.get_meta(**QUEUE, batch_size=2)),
        },
        "named": [described(client.get_meta(**NAMED, claim_name=name)) for name in ("first", "second")],
        "tiled": bool(np.array_equal(np.asarray(client.get_data(tiled_meta)["x"]), tiled(TILED_BYTES))),
        "version": client.get_version(policy="policy"),
        "consumption": [
            client.check_consumption(partition_id="train", task_name=name).consumed_count
            for name in ("update_actor", "reward_model", "by_name")
        ],
        "checkpoints": [checkpoint.name for checkpoint in client.list_checkpoints()],
    }  # fmt: skip


def tiled(size_bytes: int) -> Any:
    """Return four rows that take little space when they are compressed."""
    return np.tile(np.arange(32, dtype=np.int64), size_bytes // 256).reshape(4, -1)


def exchange(client: Any) -> dict[str, Any]:
    """Return what calls of many kinds return on an empty service."""
    write(client)
    large = tiled(LARGE_BYTES)
    meta = client.put("large", {"x": large})
    fetched = client.get_data(meta)["x"]
    status = client.status()
    try:
        client.describe_partition("none")
        error = None
    except tq.errors.PartitionNotFoundError as raised:
        error = [raised.reason, raised.metadata]
    return {
        **read(client),
        "large": bool(np.array_equal(np.asarray(fetched), large)),
        "partitions": sorted(partition.partition_id for partition in client.list_partitions()),
        "status": [len(status.partitions), len(status.storages), status.service.role],
        "error": error,
        "cleared": client.clear_partition("large"),
    }


def described(meta: Any) -> dict[str, Any]:
    """Return what identifies a claim."""
    return {
        "status": meta.status,
        "keys": meta.keys,
        "steps": [[list(pack.positions) for pack in step.packs] for step in meta.steps],
        "custom_meta": meta.custom_meta,
        "delivery_counts": list(meta.delivery_counts),
    }


def plain(data: Any) -> dict[str, Any]:
    """Return columns as lists, with their dtypes."""
    return {
        name: [value if isinstance(value, str) else [str(value.dtype), value.tolist()] for value in data[name]]
        for name in sorted(data.keys())
    }


def main() -> None:
    """Run a command."""
    command, address = sys.argv[1:]
    with tq.Client(address, timeout=30.0) as client:
        result = {"write": write, "read": read, "exchange": exchange}[command](client)
    print(json.dumps(result, sort_keys=True))


if __name__ == "__main__":
    main()
