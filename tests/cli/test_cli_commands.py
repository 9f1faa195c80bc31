"""Commands that look into a running service, and mend it, against one that runs as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import tq_service as tq
from tq_service.cli import _hint, app
from tq_service.cli.options import _complete_partition, _complete_task
from tq_service.cli.status import blocks_of, fitting
from tq_service.errors import PartitionNotFoundError, TaskNotFoundError
from tq_service.testing import COMMAND, ServiceProcess
from tq_service.version import BUILD


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ServiceProcess() as service:
        yield service.address


@pytest.fixture(autouse=True)
def environment(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_ADDRESS", address)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def client(address: str) -> Iterator[tq.Client]:
    with tq.Client(address) as client:
        yield client
        for summary in client.list_partitions():
            client.clear_partition(summary.partition_id)


@contextlib.contextmanager
def waiting(client: tq.Client, partition_id: str) -> Iterator[None]:
    """Have a claim wait for as long as the `with` lasts."""
    asked: dict[str, Any] = {"task_name": "update", "data_fields": ["x"], "batch_size": 4, "max_wait": 30.0}
    with ThreadPoolExecutor(1) as threads, tq.Client(client.address) as other:
        claimed = threads.submit(other.get_meta, partition_id=partition_id, **asked)
        while not client.explain(partition_id):
            assert not claimed.done()
        yield
        client.put(partition_id, {"x": np.zeros(4)})
        assert claimed.result().status == "batch"


@pytest.fixture
def filled(client: tq.Client) -> tq.Client:
    """Hold two partitions: one with 6 samples of which a task has taken 4, and one that is empty."""
    client.put(
        "train@0",
        {"reward": np.arange(6, dtype=np.float32), "text": [f"t{row}" for row in range(6)]},
        keys=[f"k{row}" for row in range(6)],
        groups=["a", "a", "b", "b", "c", "c"],
        group_size=2,
        custom_meta=[{"total_lengths": row, "tag": [row], "version": row + 3} for row in range(6)],
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
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def document(*arguments: str) -> Any:
    return json.loads(invoke(*arguments, "--json"))


def lines_of(*arguments: str) -> list[list[str]]:
    return [line.split() for line in invoke(*arguments).splitlines()]


def test_explain_says_why_claims_wait(client: tq.Client, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_ADDRESS")
    assert invoke("explain", "train", "-a", address) == "no claim waits for partition 'train'\n"
    with waiting(client, "train"):
        shown = invoke("task", "explain", "train", "--address", address)
        assert shown == (
            "task update: 1 call waits: there is no partition 'train'; none is known yet (PARTITION_NOT_FOUND)\n"
        )
    client.clear_partition("train")
    client.put("train", {"x": np.zeros(3)}, state="held")
    with waiting(client, "train"):
        assert invoke("explain", "train", "rewards", "-a", address) == "no claim waits for partition 'train'\n"
        shown = invoke("explain", "train", "update", "-a", address)
        assert shown.startswith("task update: 1 call waits: 0 samples are ready for task 'update'")
        (reason,) = document("explain", "train", "update", "-a", address)
        assert (reason["code"], reason["left_count"], reason["needed_count"]) == ("TOO_FEW_READY", 3, 4)
        assert [(each["kind"], each["sample_count"]) for each in reason["not_ready"]] == [("held", 3)]


def test_status_as_json(filled: tq.Client) -> None:
    shown = document("status")
    assert (shown["service"]["version"], shown["service"]["durability"], shown["waits"]) == (BUILD, "memory", [])
    assert [storage["put_count"] for storage in shown["storages"]] == [1]
    first, second = shown["partitions"]
    assert first["partition_id"] == "train@0"
    assert len(bytes.fromhex(first["incarnation"])) == 16
    counts = {name: first[f"{name}_count"] for name in ("inserted", "present", "live", "held", "failed", "group")}
    assert counts == {"inserted": 6, "present": 6, "live": 6, "held": 0, "failed": 0, "group": 3}
    (task,) = first["tasks"]
    names = ("task_name", "consumed_count", "pending_count", "dp_size", "planned_batch_count", "dead_lettered_indexes")
    assert tuple(task[name] for name in names) == ("update", 4, 2, 2, 1, [])
    assert (second["partition_id"], second["expected_samples"], second["tasks"]) == ("train@1", 10, [])
    assert [each["partition_id"] for each in document("status", "train@1")["partitions"]] == ["train@1"]
    assert [each["partition_id"] for each in document("status", "--prefix", "train@0")["partitions"]] == ["train@0"]


def test_status_for_people(filled: tq.Client, address: str) -> None:
    shown = invoke("status")
    assert re.match(rf"tq-service {re.escape(BUILD)}  {address}  up \d+\w*  instance [0-9a-f]{{8}}\n", shown)
    assert "durability memory  tls off, tokens off\n" in shown
    assert " in 1 storage service\n" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["train@0", "sealed", "6", "samples", "3", "groups", "36", "bytes"] in lines
    assert ["train@1", "open", "0", "of", "10", "samples", "0", "bytes"] in lines
    (task,) = [line for line in lines if line[:1] == ["update"]]
    assert task[1] == "4/6"
    assert task[2].endswith("/s")
    assert max(map(len, shown.splitlines())) <= 80


def test_status_shows_what_waits_for_partitions_that_do_not_exist(client: tq.Client) -> None:
    long = "x" * 90
    client.put(long, {"x": np.zeros(3)})
    assert invoke("status").splitlines()[6] == long
    with waiting(client, "trian"):
        lines = lines_of("status")
        place = lines.index(["trian", "does", "not", "exist"])
        assert lines[place + 1][:8] == ["update", "-", "-", "1", "call:", "there", "is", "no"]
        assert [wait["partition_id"] for wait in document("status", "trian")["waits"]] == ["trian"]
    client.clear_partition("trian")


def test_on_a_small_screen_whole_partitions_are_shown_those_with_waits_first(client: tq.Client) -> None:
    for number in range(30):
        client.insert(f"p{number:02}", 1)
    with waiting(client, "p25"):
        heading, blocks = blocks_of(client.status())
    lines = fitting(["header"], heading, blocks, 12)
    assert len(lines) <= 12
    place = next(number for number, line in enumerate(lines) if line.startswith("p25"))
    assert lines[place + 1].split()[0] == "update"
    assert lines[1:3] == ["", "PARTITION"]
    assert lines[-1] == f"and {len(blocks) - 5} less active partitions; list them with tq-service partition ls"


def test_an_address_where_a_partition_belongs_is_noticed(filled: tq.Client, address: str) -> None:
    result = CliRunner().invoke(app, ["status", "train@9"])
    assert isinstance(result.exception, PartitionNotFoundError)
    assert "train@1" in str(result.exception)
    assert _hint(result.exception) == ""
    result = CliRunner().invoke(app, ["status", address])
    assert isinstance(result.exception, PartitionNotFoundError)
    assert _hint(result.exception) == f"pass an address with --address: tq-service status --address {address}"


def test_status_of_an_empty_service(client: tq.Client) -> None:
    assert invoke("status").endswith("\nno partitions\n")
    assert document("status")["partitions"] == []


def test_names_are_no_markup(client: tq.Client) -> None:
    client.create_partition("[red]x[/red]")
    assert "[red]x[/red]" in invoke("status")
    assert "[red]x[/red]" in invoke("partition", "ls")


def test_watching_goes_on_over_a_restart() -> None:
    with ServiceProcess() as service:
        command = [*COMMAND, "status", "--address", service.address, "--json", "--watch", "0.1", "--timeout", "1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            first = json.loads(process.stdout.readline())
            service.kill()
            # a call that was on its way was "closed by peer"
            lost = rf"error: cannot reach {service.address}: (connection refused|closed by peer)\b"
            assert re.match(lost, process.stderr.readline())
            service.restart()
            again = json.loads(process.stdout.readline())
            while again["service"]["instance_id"] == first["service"]["instance_id"]:
                again = json.loads(process.stdout.readline())
            process.kill()


def test_partitions_are_listed_shown_sealed_and_cleared(filled: tq.Client) -> None:
    assert lines_of("partition", "ls", "train@")[1:] == [["train@0", "sealed", "6", "6"], ["train@1", "open", "0", "0"]]
    assert [each["partition_id"] for each in document("partition", "ls")] == ["train@0", "train@1"]
    lines = lines_of("partition", "show", "train@0")
    assert ["reward", "float32", "dense", "scalar", "6", "6"] in lines
    assert ["text", "-", "object", "-", "6", "6"] in lines
    assert ["tag", "json"] in lines
    assert ["update", "0", "2", "1", "4", "2", "0", "0"] in lines
    assert document("partition", "show", "train@0")["partitions"][0]["sealed"] is True
    assert invoke("partition", "seal", "train@1") == "sealed train@1 with 0 samples\n"
    refused = CliRunner().invoke(app, ["partition", "clear", "train@0"])
    assert isinstance(refused.exception, tq.errors.InvalidArgumentError)
    assert "pass --yes" in str(refused.exception)
    missing = CliRunner().invoke(app, ["partition", "clear", "train@0", "none", "--yes"])
    assert isinstance(missing.exception, PartitionNotFoundError)
    assert len(filled.list_partitions()) == 2
    cleared = document("partition", "clear", "train@0", "train@1", "--yes")
    assert [each["cleared_count"] for each in cleared] == [6, 0]
    assert filled.list_partitions() == []


def test_a_release_is_shown_with_what_it_has_released(client: tq.Client) -> None:
    client.create_partition("p", release=tq.Release("saved", ["actor", "critic"], 90.0))
    client.put("p", {"x": np.zeros(2)})
    client.fail_samples("p", global_indexes=[1])  # which no task waits for
    lines = lines_of("partition", "show", "p")
    assert ["saved", "by", "actor,", "critic", "1"] in lines
    assert ["90", "s", "old", "0"] in lines
    (shown,) = document("partition", "show", "p")["partitions"]
    assert shown["release"] == {"when": "saved", "tasks": ["actor", "critic"], "ttl_seconds": 90.0}
    assert (shown["released_count"], shown["expired_count"]) == (1, 0)


def test_fields_that_take_one_value_are_marked(client: tq.Client) -> None:
    dense = tq.FieldSpec("reward", "float32", "dense", (), write_once=True)  # type: ignore[arg-type]
    client.create_partition("p", fields=[dense, tq.FieldSpec("text", write_once=True), tq.FieldSpec("x")])
    lines = lines_of("partition", "show", "p")
    assert ["reward", "float32", "dense,", "write-once", "scalar", "0", "0"] in lines
    assert ["text", "-", "write-once", "-", "0", "0"] in lines
    assert ["x", "-", "-", "-", "0", "0"] in lines
    specs = [field["spec"] for field in document("partition", "show", "p")["partitions"][0]["fields"]]
    assert [spec["write_once"] for spec in specs] == [True, True, False]


def test_samples_can_be_peeked_at(filled: tq.Client) -> None:
    shown = document("partition", "peek", "train@0", "--limit", "2")
    assert shown[1] == {
        "global_index": 1, "key": "k1", "group": "a", "rollout": None,
        "custom_meta": {"total_lengths": 1, "tag": [1], "version": 4},
        "fields": {"reward": 1.0, "text": "t1"},
    }  # fmt: skip
    assert len(shown) == 2
    text = invoke("partition", "peek", "train@0", "--limit", "1", "--field", "reward")
    assert text.splitlines() == [
        "sample 0  key k0  group a", "  total_lengths  0", "  tag            [0]", "  version        3",
        "  reward         0 (float32)",
    ]  # fmt: skip
    assert invoke("partition", "peek", "train@1") == "partition 'train@1' has no samples\n"


def test_samples_that_are_cleared_while_they_are_peeked_at_are_looked_up_again(
    client: tq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = client.put("train", {"x": np.arange(2)})
    get_data, got = tq.Client.get_data, list[Any]()

    def cleared_before_it_is_read(self: tq.Client, *args: Any, **given: Any) -> Any:
        got.append(args)
        if len(got) == 1:
            client.put("train", {"x": np.arange(2, 4)})
            client.clear_samples(first)
        return get_data(self, *args, **given)

    monkeypatch.setattr(tq.Client, "get_data", cleared_before_it_is_read)
    shown = document("partition", "peek", "train", "--limit", "2")
    assert [(each["global_index"], each["fields"]) for each in shown] == [(2, {"x": 2}), (3, {"x": 3})]


@pytest.mark.parametrize("clear", ["clear_samples", "clear_partition"])
def test_a_partition_of_which_all_is_cleared_while_it_is_peeked_at(
    client: tq.Client, clear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = client.put("train", {"x": np.arange(2)})
    get_data = tq.Client.get_data

    def cleared_before_it_is_read(self: tq.Client, *args: Any, **given: Any) -> Any:
        getattr(client, clear)(meta if clear == "clear_samples" else "train")
        if clear == "clear_partition":
            client.create_partition("train")
        return get_data(self, *args, **given)

    monkeypatch.setattr(tq.Client, "get_data", cleared_before_it_is_read)
    assert invoke("partition", "peek", "train") == "partition 'train' has no samples\n"


def test_a_status_that_is_watched_through_a_pipe_comes_line_by_line(filled: tq.Client, address: str) -> None:
    watched = subprocess.Popen(
        [*COMMAND, "status", "--watch", "0.1", "--address", address], stdout=subprocess.PIPE, text=True
    )
    with watched, contextlib.ExitStack() as ending:
        ending.callback(watched.kill)
        assert watched.stdout is not None
        headers = [line for line in (watched.stdout.readline() for _ in range(24)) if line.startswith("tq-service ")]
        assert len(headers) > 1
        watched.stdout.close()
        assert watched.wait(timeout=60) == 1  # its reader has ended


def test_titles_stay_on_one_line_over_short_names(client: tq.Client) -> None:
    client.put("p", {"x": np.arange(2)})
    client.get_meta(partition_id="p", task_name="t", data_fields=["x"], batch_size=2)
    assert ["TASK", "DELIVERED", "RATE", "WAITING", "FOR"] in lines_of("status")


def test_where_the_time_of_steps_goes_is_shown(client: tq.Client) -> None:
    client.put("p", {"x": np.arange(2)})
    timer = tq.StepTimer()
    with timer.step():
        pass
    with timer.step():
        client.get_meta(
            partition_id="p", task_name="t", data_fields=["x"], batch_size=2, batch_index=0, dp_rank=0, dp_size=1
        )
    lines = [" ".join(line) for line in lines_of("task", "show", "p", "t")]
    assert any(line.startswith("steps ") and line.endswith("per batch: work 100 % (1 ranks)") for line in lines)
    assert any("the trainer's own work takes 100 % of the step" in line for line in lines)


def test_tasks_are_shown_and_start_over(filled: tq.Client) -> None:
    lines = lines_of("task", "show", "train@0", "update")
    assert lines[0] == ["task", "update", "of", "partition", "train@0"]
    age = ["oldest", "version", "7,", "1", "below", "the", "newest"]
    for facts in (["delivered", "4", "of", "6", "samples"], ["pending", "2"], age, ["state", "active"]):
        assert facts in lines
    assert [each["pending_count"] for each in document("task", "show", "train@0")["tasks"]] == [2]
    unknown = CliRunner().invoke(app, ["task", "show", "train@0", "updat"])
    assert isinstance(unknown.exception, TaskNotFoundError)
    assert "'update'" in str(unknown.exception)
    assert document("task", "reset", "train@0", "update", "--yes")["epoch"] == 1
    assert filled.check_consumption("train@0", "update").consumed_count == 0


def test_a_task_is_shown_with_the_claims_that_hold_leases(client: tq.Client) -> None:
    client.put("p", {"x": np.arange(30)})
    asked: dict[str, Any] = {"partition_id": "p", "task_name": "t", "data_fields": ["x"], "batch_size": 1}
    for number in range(22):
        client.get_meta(**asked, lease=600.0, claim_name=f"w{number}")
    shown = invoke("task", "show", "p", "t")
    assert re.search(r"leased to +w0 \([0-9a-f]{8}\): 1 for \d+ s, \d+ s left\n", shown)
    assert re.search(r"leased to +2 more claims\n", shown)
    (task,) = document("task", "show", "p", "t")["tasks"]
    assert (task["leasing_claim_count"], len(task["leases"])) == (22, 20)


def test_evicted_samples_are_listed_and_counted(client: tq.Client) -> None:
    client.put("p", {"x": np.arange(3)}, keys=["a", "b", "c"], custom_meta={"v": np.array([0, 0, 1])})
    asked: dict[str, Any] = {"partition_id": "p", "task_name": "t", "data_fields": ["x"], "batch_size": 4}
    client.get_meta(**asked, max_wait=0)
    assert "have not evicted any units after serial 0" in invoke("task", "evicted", "p", "t")
    assert "evicted " not in invoke("task", "show", "p", "t")
    client.get_meta(**asked, where=[("v", ">", 0)], unmatched="fail", refill=("prompts", "r"), max_wait=0)
    assert lines_of("task", "evicted", "p", "t")[1:] == [
        ["1", "sample", "-", "-", "a", "unmatched", "-", "1", "unknown"],
        ["2", "sample", "-", "-", "b", "unmatched", "-", "1", "unknown"],
    ]
    assert [each["serial"] for each in document("task", "evicted", "p", "t", "--after", "1")["units"]] == [2]
    assert re.search(r"evicted +2 by where, 0 groups with too few members, 0 late\n", invoke("task", "show", "p", "t"))


def test_a_replay_buffer_is_shown_with_what_it_dropped(client: tq.Client) -> None:
    bound = tq.Admission("t", 2, overflow="drop_lowest", samples_per_insert=2.0, error_buffer=4)
    client.create_partition("p", admissions=[bound])
    for _ in range(3):
        client.put("p", {"x": np.arange(1)})
    asked: dict[str, Any] = {"partition_id": "p", "task_name": "t", "data_fields": ["x"], "batch_size": 4}
    client.get_meta(**asked, sampler="replay", sampler_config={"fresh": 0}, dp_rank=0, dp_size=1, batch_index=0)
    shown = invoke("task", "show", "p", "t")
    assert re.search(r"dropped +1 of the lowest priority\n", shown)
    assert re.search(r"deliveries +4, including repeated deliveries\n", shown)
    assert "then the lowest by age are dropped, 2 deliveries per insert" in invoke("partition", "show", "p")
    assert lines_of("task", "evicted", "p", "t")[1] == ["1", "sample", "-", "-", "-", "overflow", "-", "1", "-"]


def test_dead_lettered_samples_are_listed_and_delivered_again(client: tq.Client) -> None:
    assert invoke("deadletter", "ls") == "no dead-lettered samples\n"
    client.put("p", {"x": np.arange(3)})
    asked: dict[str, Any] = {"partition_id": "p", "task_name": "t", "data_fields": ["x"], "batch_size": 3}
    client.get_meta(**asked, lease=0.01, max_deliveries=1)
    while client.check_consumption("p", "t").dead_lettered_count < 3:
        time.sleep(0.01)
    assert lines_of("deadletter", "ls")[1:] == [["p", "t", "3", "0", "1", "2"]]
    assert document("deadletter", "ls", "p")[0]["dead_lettered_indexes"] == [0, 1, 2]
    assert document("deadletter", "requeue", "p", "t", "1", "7")["requeued_count"] == 1
    assert "requeued 2 samples of partition p; task t can claim them again" in invoke("deadletter", "requeue", "p", "t")
    assert client.get_meta(**asked).size == 3


def test_storages_samplers_and_versions(client: tq.Client, address: str) -> None:
    (storage,) = document("storage", "ls")
    assert (storage["put_count"], storage["is_silent"], storage["version"]) == (0, False, BUILD)
    assert lines_of("storage", "ls")[1][1] == address
    samplers = {one["name"]: one for one in document("sampler", "ls")}
    assert {"sequential", "grpo_group_n", "rank_aware", "seqlen_balanced"} <= set(samplers)
    assert samplers["grpo_group_n"]["options"][0]["name"] == "n_samples_per_prompt"
    assert all(name in invoke("sampler", "ls") for name in samplers)
    assert lines_of("version") == [["client", BUILD, *lines_of("version", "--client")[0][2:]],
                                   ["service", BUILD, "(all", "at", f"{address})"]]  # fmt: skip
    assert document("version")["services"] == [{"address": address, "role": "all", "version": BUILD}]


def test_shells_complete_names_of_the_service(filled: tq.Client, address: str) -> None:
    class Context:
        def __init__(self, **params: Any) -> None:
            self.params = params

    shell: Any = Context(address=address)
    assert _complete_partition(shell, "train@") == ["train@0", "train@1"]
    shell = Context(address=address, partition="train@0")
    assert _complete_task(shell, "up") == ["update"]
    assert _complete_task(shell, "x") == []
    shell = Context(address="127.0.0.1:1")
    assert _complete_partition(shell, "") == []


def test_bench_of_a_running_service_leaves_nothing_behind(client: tq.Client, address: str) -> None:
    arguments = ["bench", "--address", address, "--seconds", "0.5", "--ranks", "2", "--size", "1MiB"]
    figures = document(*arguments)
    assert [figure["unit"] for figure in figures] == ["calls/s", "samples/s", "claims/s", "MB/s", "MB/s"]
    for figure in figures:
        assert figure["count"] > 0
        assert figure["rate"] > 0
        assert 0 < figure["p50_ms"] <= figure["p99_ms"]
    assert client.list_partitions() == []


@pytest.mark.parametrize("size", ["0", "none", "much"])
def test_bench_refuses_sizes(size: str) -> None:
    result = CliRunner().invoke(app, ["bench", "--size", size])
    assert isinstance(result.exception, tq.errors.InvalidArgumentError)
    assert f"--size: got '{size}'" in str(result.exception)


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--timeout", "600"),
        ("partition", "peek", "p"),
        ("checkpoint", "write", "nowhere"),
        ("bench",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_service_that_is_not_there_is_an_error_and_a_hint_long_before_the_timeout(arguments: tuple[str, ...]) -> None:
    command = [*COMMAND, *arguments, "--address", "127.0.0.1:1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr == (
        "error: cannot reach 127.0.0.1:1: connection refused\n"
        'hint: start a service with "tq-service serve", or set another address with --address or TQ_ADDRESS\n'
    )


def test_bench_starts_a_service_of_its_own_and_shows_it_nothing_that_is_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TQ_TLS_CA", "TQ_AUTH_TOKENS_FILE", "TQ_TOKEN_FILE"):
        monkeypatch.setenv(name, "/there/is/no/such")
    monkeypatch.setenv("TQ_HOST", "0.0.0.0")
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    shown = invoke("bench", "--seconds", "0.5", "--ranks", "2", "--size", "64KiB")
    assert "put 0.0625 MiB" in shown
    assert "claims/s" in shown


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
    def open_client(**given: object) -> Iterator[None]:
        seen.append((given["token"], given["tls"]))
        raise tq.errors.UnavailableError("seen")
        yield

    monkeypatch.setattr("tq_service.cli.status.open_client", open_client)
    CliRunner().invoke(app, ["status", *arguments])
    assert seen == [(token, tls)]
    assert dict(os.environ) == before
