"""A Ray cluster of two nodes on this machine: two raylets on loopback, whose CPUs and GPUs are numbers only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

# Ray takes them as given: its actors ask for one CPU each, verl's trainers for a GPU each.
_CPUS_PER_NODE = 16
_GPUS_PER_NODE = 1
_OBJECT_STORE_BYTES = 100 << 20


@contextmanager
def two_nodes(*, object_store_bytes: int = _OBJECT_STORE_BYTES) -> Iterator[str]:
    """Run the cluster until the block ends, its files in a directory that goes with it; yield its address.

    All that the caller has in its environment, the processes of the cluster have in theirs. A cluster that runs on this
    machine besides is not seen, nor does it see this one.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as top:
        # Ray writes the address of the cluster that was started last there, and does not make the directory.
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
