"""Keys of the engine for Valkey in a cluster, where a call goes to the server that has the slot of its key."""

from __future__ import annotations

import pytest

crc = pytest.importorskip("redis.crc", reason="the package redis is not installed (extra valkey)")

from tq_service.objects.valkey import _PROBE, _probe_beside  # noqa: E402  (needs the package)


@pytest.mark.parametrize("key", ["tq/tq/s/0a/g0-1/0", "{run7}/tq/s/0a/list0-17/0", "tq/tq/s-1/ff/successor/1"])
def test_what_shows_that_replicas_have_a_key_is_in_its_slot(key: str) -> None:
    probes = {_probe_beside(key) for _ in range(3)}
    assert len(probes) == 3
    assert {crc.key_slot(probe.encode()) for probe in probes} == {crc.key_slot(key.encode())}
    assert all(_PROBE in probe for probe in probes)
