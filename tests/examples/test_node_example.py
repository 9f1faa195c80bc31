"""The client in Node.js, written from docs/protocol.md, and the client in Python read the same samples."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import tq_service as tq
from tq_service.testing import ServiceProcess

NODE_EXAMPLE = Path(__file__).parents[2] / "examples" / "node"

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed"),
    pytest.mark.skipif(
        not (NODE_EXAMPLE / "node_modules" / "@grpc").exists(),
        reason="the packages of the example are not installed: `make test` installs them where there is npm",
    ),
]


@pytest.fixture(params=["one process", "two processes"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with ExitStack() as stack:
        if request.param == "one process":
            yield stack.enter_context(ServiceProcess()).address
            return
        (secret := tmp_path / "secret").write_text("0123456789abcdef0123456789abcdef")
        secret.chmod(0o600)
        shared = ["--internal-secret-file", str(secret)]
        controller = stack.enter_context(ServiceProcess("--role", "controller", *shared))
        stack.enter_context(ServiceProcess("--role", "storage", "--controller", controller.address, *shared))
        yield controller.address


def test_it_puts_claims_reads_and_acknowledges(address: str) -> None:
    run = subprocess.run(
        ["node", "main.mjs"],
        cwd=NODE_EXAMPLE,
        env={**os.environ, "TQ_ADDRESS": address, "TQ_PARTITION": "train"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("acknowledged 4 of 4\n")
    with tq.Client(address) as client:
        status = client.check_consumption("train", "reader")
        assert (status.consumed_count, status.leased_count, status.complete) == (4, 0, True)
        meta, _ = client.lookup_samples("train")
        data = client.get_data(meta)
    assert [np.asarray(row).tolist() for row in data["tokens"]] == [[1, 2], [3], [4, 5, 6], []]
    assert list(data["prompt"]) == ["hi", "grüß dich", "a longer prompt of more than thirty-two bytes", ""]
    assert np.asarray(data["reward"]).tolist() == [[0.5], [1], [-1], [0]]
    hidden = np.asarray(data["hidden"])
    assert hidden.shape == (4, 300_000)
    assert (hidden == np.arange(4)[:, None]).all()
