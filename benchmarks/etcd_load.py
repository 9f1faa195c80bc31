"""Does the journal in etcd stay small under load, and how long do commits take?

One controller with its journal in three members of a real etcd, and a storage service; producers put, ranks claim, and
consumed samples are cleared. Once per second the program reads etcd's bytes on disk and in use, and the number of
journal keys. `python -m benchmarks.etcd_load --seconds 600`; the exit code is 1 if the second half of the run needs
more than the first.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np

import tq_service as tq
from chaos.cluster import free_ports
from chaos.etcd import etcd_members
from tq_service.cluster.etcd import ClusterKeys, Etcd, after
from tq_service.internal.v1 import etcd_pb2 as pb
from tq_service.testing import ServiceProcess

_PRODUCERS: Final = 8
_RANKS: Final = 4
_ROWS: Final = 8
_LARGER: Final = 1.5


class Watched:
    """The state of etcd, sampled once per second."""

    def __init__(self, members: tuple[str, ...]) -> None:
        self._etcd = Etcd(members)
        self._keys = ClusterKeys("load")
        self.db_bytes: list[int] = []
        self.used_bytes: list[int] = []
        self.log_keys: list[int] = []
        self.revision = 0

    def look(self) -> None:
        """Read the state of etcd."""
        status: pb.EtcdStatusResponse = self._etcd.ask(pb.EtcdStatusRequest())
        log = pb.EtcdRangeRequest(key=self._keys.log, range_end=after(self._keys.log), count_only=True)
        self.db_bytes.append(status.db_size)
        self.used_bytes.append(status.db_size_in_use)
        self.log_keys.append(self._etcd.ask(log).count)
        self.revision = status.header.revision

    def close(self) -> None:
        """Close the connections."""
        self._etcd.close()


async def _load(address: str, watched: Watched, seconds: float) -> list[float]:
    end = time.monotonic() + seconds
    commit_seconds: list[float] = []
    data = {"x": np.zeros((_ROWS, 64))}

    async def produce(client: tq.AsyncClient) -> None:
        while time.monotonic() < end:
            began = time.monotonic()
            await client.insert("inserted", 1)  # one change without sample bytes: a single commit of the journal
            commit_seconds.append(time.monotonic() - began)
            await client.put("train", data)

    async def consume(client: tq.AsyncClient) -> None:
        while time.monotonic() < end:
            meta = await client.get_meta(
                partition_id="train", task_name="train", data_fields=["x"], batch_size=_ROWS, max_wait=1.0
            )
            if meta.status == "batch":
                await client.clear_samples(meta)

    async def clear(client: tq.AsyncClient) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(5.0)
            await client.clear_partition("inserted")

    async def look() -> None:
        while time.monotonic() < end:
            await asyncio.to_thread(watched.look)
            await asyncio.sleep(1.0)

    async with tq.AsyncClient(address, timeout=60.0) as client:
        work = [produce(client) for _ in range(_PRODUCERS)] + [consume(client) for _ in range(_RANKS)]
        await asyncio.gather(*work, clear(client), look())
    return commit_seconds


def main() -> int:
    """Run the load and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="seconds of load (default: 600)")
    given = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tq-etcd-load-")))
        ports = free_ports(6)
        for member in etcd_members(list(zip(ports[:3], ports[3:], strict=True)), directory).values():
            member.start()
            stack.callback(member.end)
        members = tuple(f"127.0.0.1:{port}" for port in ports[:3])
        watched = Watched(members)
        stack.callback(watched.close)
        secret = ["--internal-secret-file", str(directory / "secret")]
        journal = ["--journal", f"etcd://{','.join(members)}", "--cluster", "load", "--data-dir", str(directory / "d")]
        controller = stack.enter_context(ServiceProcess("--role", "controller", *journal, *secret))
        stack.enter_context(ServiceProcess("--role", "storage", "--controller", controller.address, *secret))
        took = sorted(asyncio.run(_load(controller.address, watched, given.seconds)))
    half = len(watched.db_bytes) // 2
    print(
        f"{len(took):,} commits waited for: p50 {1e3 * statistics.median(took):.1f} ms, "
        f"p99 {1e3 * took[len(took) * 99 // 100]:.1f} ms, longest {1e3 * took[-1]:.0f} ms; "
        f"revision {watched.revision:,}"
    )
    is_flat = True
    for name, values in (
        ("database bytes", watched.db_bytes),
        ("bytes in use", watched.used_bytes),
        ("journal keys", watched.log_keys),
    ):
        first, second = max(values[:half]), max(values[half:])
        is_flat &= second <= _LARGER * first
        print(f"{name}: at most {first:,} in the first half, {second:,} in the second")
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
