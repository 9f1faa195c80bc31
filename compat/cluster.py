"""A Ray cluster of two nodes on this machine: two raylets on loopback whose CPU and GPU counts are only declared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

# Ray does not verify these counts: its actors request one CPU each, verl's trainers one GPU each.
_CPUS_PER_NODE = 16
_GPUS_PER_NODE = 1
_OBJECT_STORE_BYTES = 100 << 20


@contextmanager
def two_nodes(*, object_store_bytes: int = _OBJECT_STORE_BYTES) -> Iterator[str]:
    """Run the cluster until the block ends, with its files in a temporary directory; yield its address.

    The processes of the cluster inherit the caller's environment. The cluster and any other one on this machine do not
    see each other.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as top:
        # Ray writes the address of the last started cluster there but does not create the directory.
        os.environ["RAY_TMPDIR"] = top
        directory = Path(top) / "ray"
        directory.mkdir()
        node: dict[str, Any] = {
            "num_cpus": _CPUS_PER_NODE,
            "num_gpus": _GPUS_PER_NODE,
            "object_store_memory": object_store_bytes,
            "include_dashboard": False,
            "temp_dir": str(directory),
        }
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            cluster.add_node(**node)
            yield str(cluster.address)
        finally:
            ray.shutdown()
            cluster.shutdown()
            del os.environ["RAY_TMPDIR"]
