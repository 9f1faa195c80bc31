"""Asks for one large batch after the other, each of a new task, until it is stopped: load for `planning_delay`."""

from __future__ import annotations

import json
import secrets
import sys

import tq_service as tq


def main() -> None:
    """Ask for batches: address, partition, sampler, its config as JSON, batch_size and dp_size are the arguments."""
    address, partition_id, sampler, config, batch_size, dp_size = sys.argv[1:]
    with tq.Client(address) as client:
        while True:
            meta = client.get_meta(
                partition_id=partition_id,
                task_name=secrets.token_hex(8),
                data_fields=["x"],
                batch_size=int(batch_size),
                sampler=sampler,
                sampler_config=json.loads(config),
                dp_rank=0,
                dp_size=int(dp_size),
                batch_index=0,
            )
            print(meta.size, flush=True)


if __name__ == "__main__":
    main()
