"""Reads a partition with workers while clients of both kinds are open: ADDRESS PARTITION CONTEXT NUM_WORKERS..."""

from __future__ import annotations

import asyncio
import sys

from service_rows import dataset_of, fill, taken

import tq_service as tq
from tq_service.data import StreamingDataLoader


async def main(address: str, partition: str, context: str, num_workers: int) -> None:
    """Start over with samples, clients and workers."""
    async with tq.AsyncClient(address) as async_client:
        await async_client.list_partitions()
        with tq.Client(address) as client:
            client.list_partitions()
            fill(address, partition, 42)
            read_twice(address, partition, None if context == "default" else context, num_workers)
            assert client.check_consumption(partition, "update_actor").complete
        assert (await async_client.check_consumption(partition, "update_actor")).consumed_count == 42
        await async_client.clear_partition(partition)


def read_twice(address: str, partition: str, context: str | None, num_workers: int) -> None:
    with StreamingDataLoader(dataset_of(address, partition), num_workers, 2, context) as loader:
        items = []
        for item in loader:
            items.append(item)
            if len(items) == 9:
                break
        items += list(loader)
        assert taken(items) == list(range(42))
        loader.reset()
        assert taken(list(loader)) == list(range(42))


if __name__ == "__main__":
    for number in sys.argv[4:]:
        asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(number)))
        print(f"every sample, in order, twice, of {number}", flush=True)
