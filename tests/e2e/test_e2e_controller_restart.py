"""A storage service outlives its controller."""

from __future__ import annotations

import torch

import tq_service as tq
from tq_service.testing import ServiceProcess


def test_a_storage_service_drops_what_a_former_controller_committed() -> None:
    with (
        ServiceProcess("--role", "controller") as controller,
        ServiceProcess("--role", "storage", "--controller", controller.address) as storage,
        tq.Client(controller.address, timeout=30.0) as client,
    ):
        client.put("train", {"x": torch.zeros(1000)})
        while client.storage_stat(storage.address).uncommitted_put_count:  # it hears of commits a short time later
            pass

        controller.restart()
        # Waits, with the retries of the client, until the storage service is known to the new controller.
        meta = client.put("train", {"x": torch.ones(10)})

        while client.storage_stat(storage.address).put_count > 1:
            pass
        assert client.get_data(meta)["x"].tolist() == [1.0] * 10
        assert meta.global_indexes == list(range(10))
