"""`status`, `samplers` and `bench` against a service that runs as a process of its own."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import tq_service as tq
from tq_service.cli import app
from tq_service.cli.status_view import render
from tq_service.errors import PartitionNotFoundError
from tq_service.testing import COMMAND, ServiceProcess


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ServiceProcess() as service:
        yield service.address


@pytest.fixture
def client(address: str) -> Iterator[tq.Client]:
    with tq.Client(address) as client:
        yield client
        for summary in client.list_partitions():
            client.clear_partition(summary.partition_id)


@pytest.fixture
def filled(client: tq.Client) -> tq.Client:
    """Hold two partitions: one with 6 samples of which a task has taken 4, and one that is empty."""
    client.put(
        {"reward": np.zeros(6, np.float32), "text": [f"t{row}" for row in range(6)]},
        partition_id="train@0",
        groups=["a", "a", "b", "b", "c", "c"],
        group_size=2,
        custom_meta=[{"total_lengths": row, "tag": [row]} for row in range(6)],
    )
    client.seal_partition("train@0")
    client.get_meta(
        partition_id="train@0",
        task_name="update",
        data_fields=["reward"],
        batch_size=2,
        dp_rank=0,
        dp_size=2,
        batch_index=0,
        max_wait=5.0,
    )
    client.create_partition("train@1", expected_samples=10)
    return client


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_status_as_json(filled: tq.Client, address: str) -> None:
    first, second = json.loads(invoke("status", address, "--json"))["partitions"]
    assert first["partition_id"] == "train@0"
    assert len(bytes.fromhex(first["incarnation"])) == 16
    counts = {name: first[f"{name}_count"] for name in ("inserted", "present", "live", "held", "failed", "group")}
    assert counts == {"inserted": 6, "present": 6, "live": 6, "held": 0, "failed": 0, "group": 3}
    assert (first["sealed"], first["expected_samples"]) == (True, None)
    assert first["custom_meta_columns"] == [
        {"name": "total_lengths", "kind": "int64", "has_json": False}, {"name": "tag", "kind": "", "has_json": True},
    ]  # fmt: skip
    reward, text = first["fields"]
    spec = {"name": "reward", "dtype": "float32", "layout": "dense", "row_shape": [], "encoding": None}
    assert reward == {"spec": spec, "produced_count": 6}
    assert (text["spec"]["name"], text["spec"]["layout"], text["produced_count"]) == ("text", "object", 6)
    (task,) = first["tasks"]
    names = ("task_name", "consumed_count", "dp_size", "planned_batch_count", "dead_lettered_indexes")
    assert tuple(task[name] for name in names) == ("update", 4, 2, 1, [])
    assert (task["epoch"], task["skipped_count"], task["waiting_count"], task["complete"]) == (0, 0, 0, False)
    assert (second["partition_id"], second["expected_samples"], second["tasks"]) == ("train@1", 10, [])


def test_status_as_tables(filled: tq.Client, address: str) -> None:
    lines = [line.split() for line in invoke("status", address).splitlines()]
    assert ["train@0", "6", "-", "6", "6", "0", "0", "3", "36", "bytes", "sealed"] in lines
    assert ["train@1", "0", "10", "0", "0", "0", "0", "0", "0", "bytes", "open"] in lines
    assert ["train@0", "reward", "float32", "dense", "scalar", "6", "6"] in lines
    assert ["train@0", "text", "-", "object", "-", "6", "6"] in lines
    assert ["train@0", "total_lengths", "int64"] in lines
    assert ["train@0", "tag", "json"] in lines
    assert ["train@0", "update", "0", "2", "1", "4", "6", "0", "0", "0", "0", "active"] in lines


def test_status_of_one_partition(filled: tq.Client, address: str) -> None:
    documents = json.loads(invoke("status", address, "--partition", "train@1", "--json"))["partitions"]
    assert [document["partition_id"] for document in documents] == ["train@1"]
    result = CliRunner().invoke(app, ["status", address, "--partition", "train@9"])
    assert isinstance(result.exception, PartitionNotFoundError)
    assert "train@1" in str(result.exception)


def test_status_of_an_empty_service(client: tq.Client, address: str) -> None:
    assert invoke("status", address) == "no partitions\n"
    assert json.loads(invoke("status", address, "--json")) == {"partitions": []}


def test_names_are_no_markup(client: tq.Client, address: str) -> None:
    client.create_partition("[red]x[/red]")
    assert "[red]x[/red]" in invoke("status", address)
    assert render([]) is not None


def test_watching_prints_again(filled: tq.Client, address: str) -> None:
    command = [*COMMAND, "status", address, "--json", "--watch", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.kill()
    assert seen[0] == seen[1]
    assert len(seen[0]["partitions"]) == 2


def test_samplers(client: tq.Client, address: str) -> None:
    samplers = {one["name"]: one for one in json.loads(invoke("samplers", address, "--json"))}
    assert {"sequential", "grpo_group_n", "rank_aware", "seqlen_balanced"} <= set(samplers)
    assert "n_samples_per_prompt" in samplers["grpo_group_n"]["options"]
    table = invoke("samplers", address)
    assert all(name in table for name in samplers)


def test_bench_of_a_running_service_leaves_nothing_behind(client: tq.Client, address: str) -> None:
    arguments = ["bench", address, "--seconds", "0.5", "--ranks", "2", "--size", "1MiB"]
    figures = json.loads(invoke(*arguments, "--json"))
    assert [figure["unit"] for figure in figures] == ["calls/s", "samples/s", "claims/s", "MB/s", "MB/s"]
    for figure in figures:
        assert figure["count"] > 0
        assert figure["rate"] > 0
        assert 0 < figure["p50_ms"] <= figure["p99_ms"]
    assert client.list_partitions() == []


def test_bench_starts_a_service_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    table = invoke("bench", "--seconds", "0.5", "--ranks", "2", "--size", "64KiB")
    assert "put 0.0625 MiB" in table
    assert "claims/s" in table


@pytest.mark.parametrize("size", ["0", "none", "much"])
def test_bench_refuses_sizes(size: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--size", size])
    assert isinstance(result.exception, tq.InvalidArgumentError)
    assert f"--size: got '{size}'" in str(result.exception)


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "127.0.0.1:1", "--timeout", "600"),
        ("samplers", "127.0.0.1:1", "--timeout", "600"),
        ("checkpoint", "/nowhere", "127.0.0.1:1"),
        ("restore", "/nowhere", "127.0.0.1:1"),
        ("bench", "127.0.0.1:1"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_nobody_there_is_one_line_and_exit_code_1_long_before_the_timeout(arguments: tuple[str, ...]) -> None:
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr == "error: cannot reach 127.0.0.1:1: connection refused; is the service running there?\n"


def test_bench_shows_its_own_service_nothing_that_is_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TQ_TLS_CA", "TQ_AUTH_TOKENS_FILE", "TQ_TOKEN_FILE"):
        monkeypatch.setenv(name, "/there/is/no/such")
    monkeypatch.setenv("TQ_HOST", "0.0.0.0")
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    assert "claims/s" in invoke("bench", "--seconds", "0.5", "--ranks", "2", "--size", "64KiB")


@pytest.mark.parametrize(
    ("arguments", "environment", "token", "tls"),
    [
        ((), {}, None, None),
        (("--token-file", "t"), {"TQ_TOKEN_FILE": "other"}, Path("t"), None),
        (("--tls-ca", "ca"), {"TQ_TLS_CA": "other"}, None, tq.Tls(ca="ca")),
        ((), {"TQ_TLS_CA": "ca", "TQ_TLS_CERT": "c", "TQ_TLS_KEY": "k"}, None, tq.Tls(ca="ca", cert="c", key="k")),
        (("--tls-cert", "mine"), {"TQ_TLS_CERT": "cert", "TQ_TLS_KEY": "key"}, None, tq.Tls(cert="mine", key="key")),
    ],
)  # fmt: skip
def test_files_of_token_and_tls_go_to_the_client_and_the_environment_stays(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], environment: dict[str, str], token: Any, tls: Any
) -> None:
    for name in ("TQ_TLS_CA", "TQ_TLS_CERT", "TQ_TLS_KEY", "TQ_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before, seen = dict(os.environ), []

    @contextlib.contextmanager
    def open_client(*_: object, **credentials: object) -> Iterator[None]:
        seen.append(credentials)
        raise tq.UnavailableError("seen")
        yield

    monkeypatch.setattr("tq_service.cli.status.open_client", open_client)
    CliRunner().invoke(app, ["status", *arguments])
    assert seen == [{"token": token, "tls": tls}]
    assert dict(os.environ) == before
