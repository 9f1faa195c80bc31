"""compose.yaml and compose.secure.yaml: storage services are found at the ports that are published."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from manifests import ROOT

FILES = ("compose.yaml", "compose.secure.yaml", "compose.ha.yaml")


def services_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the services of a file that run `serve`, with the defaults of its variables."""
    text = re.sub(r"\$\{\w+:?-(.*?)\}", r"\1", (ROOT / name).read_text())
    found = yaml.safe_load(text)["services"].items()
    return {name: each for name, each in found if "TQ_ROLE" in each.get("environment", {})}


@pytest.mark.parametrize("name", FILES)
def test_each_storage_service_has_a_bulk_port_that_is_published_under_its_own_number(name: str) -> None:
    published: list[str] = []
    for service in services_of(name).values():
        given = service["environment"]
        ports = [str(port).removeprefix("127.0.0.1:").split(":") for port in service.get("ports", ())]
        published += [outside for outside, _ in ports]
        if given["TQ_ROLE"] == "controller":
            assert "TQ_BULK_PORT" not in given
            continue
        bulk_port = str(given["TQ_BULK_PORT"])
        assert 0 < int(bulk_port) != 50051
        if "50051" in {inside for _, inside in ports}:
            assert [bulk_port, bulk_port] in ports  # a client takes it for the host at which it has the service
    assert len(set(published)) == len(published)


def test_the_image_listens_on_the_ports_that_it_exposes() -> None:
    text = (ROOT / "docker/Dockerfile").read_text()
    assert re.findall(r"^EXPOSE (.*)$", text, re.MULTILINE) == ["50051 50052"]
    assert "TQ_BULK_PORT=50052" in text
