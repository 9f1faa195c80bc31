"""Leases over a crash of the service: kept, with their full time from the restart on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tq_service as tq
from tq_service.testing import ServiceProcess

ASKS: dict[str, Any] = {"partition_id": "train", "task_name": "t", "data_fields": ["x"], "min_batch_size": 1}


def test_leases_outlive_a_crash_of_the_service(tmp_path: Path) -> None:
    flags = ("--data-dir", str(tmp_path), "--durability", "process")
    with ServiceProcess(*flags) as server, tq.Client(server.address, timeout=60.0) as client:
        client.put("train", {"x": torch.arange(8)})
        client.seal_partition("train")
        kept = client.get_meta(**ASKS, batch_size=4, lease=600.0)
        crashed = client.get_meta(**ASKS, batch_size=4, lease=600.0, max_deliveries=2)
        assert client.ack(kept.select_samples([0])) == 1
        assert client.ack(crashed.select_samples([0])) == 1
        server.restart()
        assert client.check_consumption("train", "t").leased_count == 6
        assert client.ack(kept) == 3
        assert client.extend(crashed, 1.0) == 3
        server.restart()
        again = client.get_meta(**ASKS, batch_size=4, lease=0.2, max_deliveries=2, max_wait=30.0)
        assert (again.global_indexes, again.delivery_counts) == ([5, 6, 7], (2, 2, 2))
        with pytest.raises(tq.errors.LeaseExpiredError, match="5, 6, 7"):
            client.ack(crashed)
        end = client.get_meta(**ASKS, batch_size=4, max_wait=30.0)
        assert (end.status, end.skipped_count) == ("end", 3)
        server.restart()
        status = client.check_consumption("train", "t")
        assert (status.consumed_count, status.dead_lettered_count, status.leased_count, status.complete) == (
            5,
            3,
            0,
            True,
        )
        with pytest.raises(tq.errors.LeaseExpiredError):
            client.ack(again)
        assert client.ack(kept) == 0
