"""Runs as root of network namespaces of its own (`unshare -Urn`): a service in one, clients in the other.

The cable between them is unplugged: packets go nowhere, and nobody is told. Prints "done" when all held.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tq_service.testing import COMMAND, ServiceProcess

SERVICE_IP, CLIENT_IP, PORT = "10.99.0.1", "10.99.0.2", 7001
ADDRESS = f"{SERVICE_IP}:{PORT}"
ASKS = {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "batch_size": 4}


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, timeout=20)


def cable(state: str) -> None:
    sh(f"ip link set client-end {state}")


def connect(service_pid: int) -> None:
    """Lay a cable into the namespace of the service."""
    inside = f"nsenter -t {service_pid} -n"
    sh(f"ip link add client-end type veth peer name service-end netns {service_pid}")
    sh("ip link set lo up")
    sh(f"ip addr add {CLIENT_IP}/24 dev client-end")
    sh(f"{inside} ip link set lo up")
    sh(f"{inside} ip addr add {SERVICE_IP}/24 dev service-end")
    sh(f"{inside} ip link set service-end up")
    cable("up")


def scenarios() -> None:
    import tq_service as tq

    with tq.Client(ADDRESS, timeout=60.0) as far, ThreadPoolExecutor(1) as pool:
        far.create_partition("train")
        claim = pool.submit(far.get_meta, **ASKS, max_wait=60.0)
        while sum(task.waiting_count for task in far.describe_partition("train").tasks) < 1:
            pass
        cable("down")
        begun = time.monotonic()
        with tq.Client(ADDRESS) as hasty:
            for call in (lambda: hasty.list_partitions(timeout=1.0), lambda: far.list_partitions(timeout=1.0)):
                try:
                    call()
                except (tq.errors.UnavailableError, tq.errors.DeadlineError):
                    continue
                raise AssertionError("a call came through a cable that is unplugged")
        assert time.monotonic() - begun < 30, "calls took far longer than their deadline"
        assert not claim.done()
        cable("up")
        far.put("train", {"x": np.arange(4)})
        assert claim.result(60).global_indexes == [0, 1, 2, 3]

        rows = np.arange(8 << 20, dtype=np.uint8).reshape(8, -1)
        put = pool.submit(far.put, "bulk", {"x8": rows}, keys=[str(row) for row in range(8)])
        cable("down")
        time.sleep(1.0)
        cable("up")
        meta = put.result(60)
        assert np.array_equal(np.asarray(far.get_data(meta)["x8"]), rows)
        assert far.describe_partition("bulk").live_count == 8
        assert far.storage_stat().uncommitted_put_count == 0


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]
    flags = ("--host", "0.0.0.0", "--port", str(PORT), "--insecure", "--shared-memory", "off")
    with ServiceProcess(*flags, command=("unshare", "-n", *COMMAND)) as service:
        connect(service.pid)
        scenarios()
        print("done")


if __name__ == "__main__":
    main()
