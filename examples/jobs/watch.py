"""A dashboard follows the tags of samples: each change arrives once, without polling."""

import asyncio

import tq_service as tq
from tq_service.testing import ServiceProcess


async def main(address: str) -> None:
    """Follow the tags until there are two. `tq-service status --watch 1` shows counts of all partitions instead."""
    tags: dict[str | None, dict[str, int]] = {}
    async with tq.AsyncClient(address) as client, client.watch("train") as watch:
        await client.put("train", {"x": [1, 2]}, keys=["a", "b"], custom_meta=[{"score": 1}, {"score": 0}])
        # Job: keep the tags up to date.
        async for update in watch:
            for samples in (each.samples for each in update.partitions if each.samples is not None):
                tags.update(zip(samples.keys, samples.custom_meta, strict=True))

            if len(tags) == 2:
                break
    print(tags)


with ServiceProcess() as service:
    asyncio.run(main(service.address))
