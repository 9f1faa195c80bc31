"""A Ray cluster of one node, for the programs that need one in their own environments."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def ray_cluster(*, cpu_count: int, object_store_bytes: int) -> Iterator[None]:
    """Run Ray until the block ends, without its dashboard, with its files in a temporary directory.

    With the variables of `benchmarks.peer_environment` it listens on loopback only. Its processes end with this one,
    even if this one is killed.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        ray.init(
            num_cpus=cpu_count,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=directory,
        )
        try:
            yield
        finally:
            ray.shutdown()
