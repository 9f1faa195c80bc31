"""Run some actors in one process: `python -m chaos.client_process ADDRESS PARTITION DIRECTORY SEED KIND NUMBER...`.

The process exits with 0 when all actors are done, and with 1 if an actor received a wrong response from the service.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import tq_service as tq
from chaos.actors import ACTORS
from chaos.cluster import without_torch
from tq_service.dataplane.shared_memory.client import SWITCH_VARIABLE

STOP_FILE = "stop"
_TIMEOUT_SECONDS = 90.0


async def _run(address: str, partition_id: str, directory: Path, seed: int, kind: str, *numbers: int) -> None:
    async def act(number: int) -> None:
        async with tq.AsyncClient(address, timeout=_TIMEOUT_SECONDS) as client:
            actor = ACTORS[kind](
                client=client,
                partition_id=partition_id,
                number=number,
                directory=directory,
                seed=seed,
                stopping=(directory / STOP_FILE).exists,
            )
            await actor.run()

    async with asyncio.TaskGroup() as actors:
        for number in numbers:
            actors.create_task(act(number))


if __name__ == "__main__":
    without_torch()
    address, partition_id, directory, seed, kind, *numbers = sys.argv[1:]
    if int(numbers[0]) // len(numbers) % 2:  # half of the producers and ranks use no shared memory
        os.environ[SWITCH_VARIABLE] = "off"
    asyncio.run(_run(address, partition_id, Path(directory), int(seed), kind, *map(int, numbers)))
