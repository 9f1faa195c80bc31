"""The client in Node.js, written from docs/protocol.md, and the client in Python read the same samples."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


@pytest.fixture(params=[pytest.param("one process", marks=pytest.mark.nightly), "two processes"])
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


OBJECTS = [
    "text", "", b"\xff\x00", b"", None, True, False, 0, 127, 128, 255, 65_535, 2**32 - 1, 2**40, -1, -32, -128, -2**15,
    -2**31, -2**40, 0.5, [], [1, [2]], list(range(20)), {}, {"a": {"b": None}}, {str(n): n for n in range(20)},
    "ü" * 40, "y" * 70_000, ["z" * 300, b"b" * 300],
]  # fmt: skip
READER = """
import { Client } from "./tq.mjs";
const client = new Client(process.env.TQ_ADDRESS, { protos: "../../protos" });
const meta = await client.claim("objects", "reader", ["x"], %d);
const { x } = await client.get(meta);
const shown = (value) => {
  if (Buffer.isBuffer(value)) return { hex: value.toString("hex") };
  return Array.isArray(value) ? value.map(shown) : value;
};
console.log(JSON.stringify(x.map(shown)));
client.close();
"""

OVERWRITER = """
import { Client, dense, indexesOf } from "./tq.mjs";
const client = new Client(process.env.TQ_ADDRESS, { protos: "../../protos" });
await client.put("train", [dense("x", "int32", [[1], [2], [3]])]);
const meta = await client.claim("train", "reader", ["x"], 3);
const { partition_id, incarnation } = meta;
const there = { incarnation, global_indexes: indexesOf(meta) };
await client.put(partition_id, [dense("x", "int32", [[4], [5], [6]])], there);
// Another process removes overwritten cells a little later; until then they can be read.
let x;
do ({ x } = await client.get(meta)); while (x[0][0] === 1);
console.log(x.map((row) => row[0]).join());
client.close();
"""


def run_node(address: str, *command: str) -> str:
    run = subprocess.run(
        ["node", *command],
        cwd=NODE_EXAMPLE,
        env={**os.environ, "TQ_ADDRESS": address, "TQ_PARTITION": "train"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_it_reads_objects_of_all_encodings(address: str) -> None:
    def shown(value: Any) -> Any:
        if isinstance(value, bytes):
            return {"hex": value.hex()}
        return [shown(each) for each in value] if isinstance(value, list) else value

    with tq.Client(address) as client:
        client.put("objects", {"x": OBJECTS[:2]})
        client.put("objects", {"x": OBJECTS[2:4]})
        client.put("objects", {"x": OBJECTS[4:]})
    found = run_node(address, "--input-type=module", "--eval", READER % len(OBJECTS))
    assert json.loads(found) == [shown(value) for value in OBJECTS]


def test_cells_that_were_overwritten_since_the_claim_are_located_again(address: str) -> None:
    assert run_node(address, "--input-type=module", "--eval", OVERWRITER) == "4,5,6\n"


def test_cells_that_have_grown_are_read_as_one(address: str) -> None:
    with tq.Client(address) as client:
        client.create_partition("grown")
        slots = client.acquire("grown", "rollout", count=2, lease=60.0)
        for at, rows in (([0, 0], [[[1, 2], [3, 4]], [[5, 6]]]), ([2, 1], [[[7, 8]], [[9, 10], [11, 12]]])):
            client.append(slots, {"x": [np.array(row, np.int32) for row in rows]}, at=at)
        client.truncate(slots, to=[3, 2], data_fields=["x"])
        client.append(slots, {"x": [np.array([[row, row]], np.int32) for row in (13, 14)]}, at=[3, 2])
        client.put(slots, {"y": np.arange(2)}, ack=True)
    script = """
        import { Client } from "./tq.mjs";
        const client = new Client(process.env.TQ_ADDRESS, { protos: "../../protos" });
        const { x } = await client.get(await client.claim("grown", "reader", ["x"], 2));
        console.log(x.map((row) => row.join()).join(" "));
        client.close();
    """
    found = run_node(address, "--input-type=module", "--eval", script)
    assert found == "1,2,3,4,7,8,13,13 5,6,9,10,14,14\n"


def test_indexes_that_come_as_ranges_are_read(address: str) -> None:
    script = """
        import { indexesOf } from "./tq.mjs";
        const index_ranges = { first_indexes: [3, 9], index_counts: [2, 1] };
        console.log(indexesOf({ global_indexes: [], index_ranges }).join());
    """
    assert run_node(address, "--input-type=module", "--eval", script) == "3,4,9\n"


def test_it_puts_claims_reads_and_acknowledges(address: str) -> None:
    out = run_node(address, "main.mjs")
    assert out.endswith("acknowledged 4 of 4\n")
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
