"""What tests of calls share."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import LiveServer, StartServer


@pytest.fixture(params=["shared_memory", "frames", "bulk", "data_dir", "split"])
def service_of_each_way(request: pytest.FixtureRequest, start_server: StartServer, tmp_path: Any) -> LiveServer:
    """A service whose clients read in one of all ways; "split": from two storage services."""
    kind = request.param
    if kind == "split":
        controller = start_server(role="controller", shared_memory="off")
        for name in ("one", "two"):
            start_server(role="storage", storage_id=name, controller=controller.address, shared_memory="off")
        return controller
    flags = {"data_dir": str(tmp_path)} if kind == "data_dir" else {}
    shared_memory, bulk = ("on" if kind == "shared_memory" else "off"), ("off" if kind == "frames" else "on")
    return start_server(shared_memory=shared_memory, bulk=bulk, **flags)
