"""Keys, groups and custom_meta that were put as columns are there again after a restart, and found as before."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import tq_service as tq
from tq_service.testing import ServiceProcess

COUNT = 3000


def test_names_that_were_put_as_columns_come_back(tmp_path: Path) -> None:
    numbers = np.arange(COUNT)
    keys = np.char.add("prompt-ü", numbers.astype(str))
    groups = np.char.add("g", (numbers // 8).astype(str))
    with ServiceProcess("--data-dir", str(tmp_path)) as server, tq.Client(server.address) as client:
        client.put(
            "p",
            {"x": numbers},
            keys=keys,
            groups=groups,
            group_size=8,
            custom_meta={"n": numbers, "s": numbers / 2, "t": groups},
        )
        server.kill()
    with ServiceProcess("--data-dir", str(tmp_path)) as server, tq.Client(server.address) as client:
        found, missing = client.lookup_samples("p", [*keys[::-1].tolist(), "none"])
        assert (found.global_indexes, missing) == (numbers[::-1].tolist(), ["none"])
        assert (found.keys, found.groups) == (keys[::-1].tolist(), groups[::-1].tolist())
        assert found.custom_meta[0] == {"n": COUNT - 1, "s": (COUNT - 1) / 2, "t": groups[-1]}
        again = client.put("p", {"x": -numbers}, keys=keys, groups=groups, key_mode="existing")
        assert again.global_indexes == numbers.tolist()
        client.clear_samples("p", keys=keys[:1500].tolist())
        left, missing = client.lookup_samples("p", keys.tolist())
        assert (left.keys, missing) == (keys[1500:].tolist(), keys[:1500].tolist())
