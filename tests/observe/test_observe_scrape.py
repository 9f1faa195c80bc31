"""A scrape of a real service: what it has, in both formats, how much of it, and who may have it."""

from __future__ import annotations

import asyncio
import re
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import Authority, add_token
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

import tq_service as tq
from tq_service.config import load_settings
from tq_service.errors import InvalidArgumentError
from tq_service.observe.service import MOST_LINES, of_storage
from tq_service.results import MirrorStatus
from tq_service.storage.engine import EngineStat

sys.path.insert(0, str(Path(__file__).parent.parent))
from live_server import LiveServer, LoopThread, StartServer
from scraping import fetch, scrape

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture(scope="module")
def live(loop_thread: LoopThread) -> Iterator[LiveServer]:
    with LiveServer(loop_thread, metrics_port=0) as started:
        client = started.client()
        lengths = [{"total_lengths": length, "version": 3} for length in (30, 10, 10, 10)]
        for step in (0, 1):
            client.put(f"train@{step}", {"x": np.arange(4.0)}, custom_meta=lengths)
            claim = {"partition_id": f"train@{step}", "data_fields": ["x"]}
            for rank in (0, 1):
                ranked = {"dp_rank": rank, "dp_size": 2, "batch_index": 0, "batch_size": 1}
                meta = client.get_meta(task_name="update", **ranked, **claim)
                client.get_data(meta)
        client.clear_partition("train@0")
        client.get_meta(task_name="reward", batch_size=2, lease=60.0, **claim)
        client.get_meta(task_name="reward", batch_size=4, lease=60.0, max_wait=0.05, **claim)
        with pytest.raises(tq.errors.PartitionNotFoundError):
            client.describe_partition("nothing")
        yield started


def test_partitions_are_in_it_by_group(live: LiveServer) -> None:
    found = scrape(live)
    assert found["tq_service_samples", "train", "live"] == 4
    assert found["tq_service_samples_inserted_total", "train"] == 8
    assert found["tq_service_samples_cleared_total", "train"] == 4
    assert found["tq_service_partitions", "train"] == 1
    assert found["tq_service_partition_bytes", "train"] == 32
    of_tasks = {
        name: [found[f"tq_service_{name}", "train", task] for task in ("update", "reward")]
        for name in (
            "samples_delivered_total",
            "task_pending_samples",
            "task_ready_samples",
            "task_leased_samples",
            "task_oldest_version",
            "task_staleness_versions",
        )
    }
    assert of_tasks == {
        "samples_delivered_total": [4, 2],
        "task_pending_samples": [2, 2],
        "task_ready_samples": [2, 2],
        "task_leased_samples": [0, 2],
        "task_oldest_version": [3, 3],
        "task_staleness_versions": [0, 0],
    }


def test_batches_are_in_it_by_sampler(live: LiveServer) -> None:
    found = scrape(live)
    assert found["tq_service_plan_seconds_count", "sequential"] == 3
    assert found["tq_service_batch_imbalance_ratio_count", "sequential"] == 2
    assert found["tq_service_batch_imbalance_ratio_sum", "sequential"] == pytest.approx(1.0)
    assert found["tq_service_batch_imbalance_ratio_bucket", "0.3", "sequential"] == 0
    assert found["tq_service_batch_padding_ratio_sum", "sequential"] == 0


def test_calls_are_in_it_by_the_names_that_others_have(live: LiveServer) -> None:
    found = scrape(live)
    service = "tq_service.v1.ControllerService"
    assert found["grpc_server_started_total", "GetMeta", service, "unary"] == 6
    assert found["grpc_server_handled_total", "OK", "GetMeta", service, "unary"] == 6
    assert found["grpc_server_handled_total", "NotFound", "DescribePartition", service, "unary"] == 1
    assert found["grpc_server_handling_seconds_count", "GetMeta", service, "unary"] == 6
    waited = found["tq_service_wait_seconds_sum", "GetMeta", service, "unary"]
    assert waited >= 0.04
    assert found["grpc_server_handling_seconds_sum", "GetMeta", service, "unary"] < waited + 60
    assert found["tq_service_wait_seconds_bucket", "GetMeta", service, "unary", "0.01"] == 5


def test_the_process_is_in_it(live: LiveServer) -> None:
    found = scrape(live)
    names = {name for name, *_ in found}
    assert found["tq_service_storage_used_bytes", "test-storage"] == 32
    assert found["tq_service_storage_written_bytes_total", "test-storage"] == 64
    assert found["tq_service_storage_read_bytes_total", "test-storage"] == 32
    assert found["tq_service_storage_bulk_bytes_total", "test-storage"] == 0
    assert found["tq_service_storage_bulk_connections", "test-storage"] == 0
    assert found["tq_service_storages", "available"] == 1
    assert found["tq_service_metrics_dropped_series",] == 0
    assert {"tq_service_build_info", "tq_service_loop_lag_seconds_count", "process_resident_memory_bytes"} <= names
    assert found["tq_service_connections",] >= 1
    assert not {name for name in names if name.startswith("tq_service_log_")}  # it has none


def test_both_formats_say_the_same(live: LiveServer) -> None:
    text, openmetrics = fetch(live), fetch(live, Accept=OPENMETRICS)
    assert text.kind.startswith("text/plain")
    assert openmetrics.kind.startswith("application/openmetrics-text; version=1.0.0")
    assert openmetrics.text.endswith("# EOF\n")
    families = {family.name.removesuffix("_info") for family in parse_text(text.text)}
    assert families == {family.name for family in parse_openmetrics(openmetrics.text)}


def test_everything_else_is_refused(live: LiveServer) -> None:
    for path, method, status in (("/", "GET", 404), ("/metrics", "POST", 501), ("/metrics/x", "GET", 404)):
        assert fetch(live, path, method=method).status == status
    assert fetch(live, "/metrics?x=1").status == 200
    assert fetch(live, method="HEAD").text == ""


def test_a_scrape_has_no_more_lines_than_it_may(start_server: StartServer) -> None:
    """Of 300 groups with a task each, and of 20 tasks of one."""
    live = start_server(metrics_port=0)
    client = live.client()
    tasks = [f"task{number}" for number in range(20)]
    for number in range(300):
        client.create_partition(f"group{number}", tasks=tasks if number < 40 else tasks[:1])
    lines = fetch(live).text.splitlines()
    assert 2_500 < len(lines) <= MOST_LINES
    found = scrape(live)
    assert found["tq_service_metrics_dropped_series",] > 10_000
    shown = {key[1] for key in found if key[0] == "tq_service_partitions"}
    assert "group0" in shown
    assert len(shown) > 100
    for number in range(290):
        client.clear_partition(f"group{number}")
    found = scrape(live)
    assert {key[1] for key in found if key[0] == "tq_service_partitions"} >= {f"group{n}" for n in range(290, 300)}


def test_names_that_need_escapes_can_be_read(start_server: StartServer) -> None:
    live = start_server(metrics_port=0)
    name = 'a "name"\\ of {words}, é'
    live.client().put(name, {"x": np.arange(2)})
    assert scrape(live)["tq_service_samples", name, "live"] == 2


def test_a_log_is_in_it_and_counts_begin_again_after_a_start(start_server: StartServer, tmp_path: Path) -> None:
    flags = {"metrics_port": 0, "data_dir": str(tmp_path / "data")}
    live = start_server(**flags)
    live.client().put("train", {"x": np.arange(4)})
    assert scrape(live)["tq_service_samples_inserted_total", "train"] == 4
    live.stop()
    again = start_server(**flags)
    found = scrape(again)
    assert found["tq_service_samples_inserted_total", "train"] == 0
    assert found["tq_service_samples", "train", "live"] == 4
    assert found["tq_service_log_failing",] == found["tq_service_log_unflushed_records",] == 0
    assert found["tq_service_log_snapshot_age_seconds",] >= 0


def test_a_storage_service_of_its_own_has_metrics_too(start_server: StartServer) -> None:
    controller = start_server(metrics_port=0)
    storage = start_server(
        role="storage", storage_id="apart", controller=controller.address, metrics_port=0, shared_memory="off"
    )
    found = scrape(storage)
    assert found["tq_service_storage_puts", "apart"] == 0
    assert ("tq_service_partitions", "train") not in found
    assert [key[2] for key in found if key[0] == "tq_service_build_info"] == ["storage"]
    assert not [name for name, *_ in found if "mirror" in name]  # it has none
    assert scrape(controller)["tq_service_storages_lost_total",] == 0


def test_a_mirror_is_in_it_and_what_was_taken_over(start_server: StartServer, tmp_path: Path) -> None:
    controller = start_server(metrics_port=0, role="controller")
    flags = {
        "role": "storage", "storage_id": "one", "controller": controller.address, "metrics_port": 0,
        "shared_memory": "off", "mirror": f"file://{tmp_path}/mirror", "mirror_required": 1,
    }  # fmt: skip

    def mirror_of(live: LiveServer) -> dict[str, float]:
        prefix = "tq_service_storage_mirror_"
        found = scrape(live)
        return {name.removeprefix(prefix): found[name, "one"] for name, *_ in found if name.startswith(prefix)}

    def wait_for(condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < until, (mirror_of(one), scrape(controller))
            time.sleep(0.05)

    one = start_server(**flags)
    controller.client().put("train", {"x": np.arange(4)})
    counts = {"unmirrored_bytes": 0, "short_puts": 0, "adopted_puts": 0, "unfetched_puts": 0, "spilled_bytes": 0}
    wait_for(lambda: mirror_of(one) == {"answers": 1, **counts})
    one.stop()
    one = start_server(**flags)  # it comes back empty, and takes over what it has left
    wait_for(lambda: mirror_of(one) == {"answers": 1, **counts, "adopted_puts": 1})
    wait_for(lambda: scrape(controller)["tq_service_storages_taken_over_total",] == 1)
    assert scrape(controller)["tq_service_storages_lost_total",] == 1
    assert scrape(one)["tq_service_storage_puts", "one"] == 0
    back = controller.client().get_data("train", global_indexes=range(4), data_fields=["x"])
    assert list(back["x"]) == [0, 1, 2, 3]


def test_a_storage_service_has_one_series_for_all_that_it_mirrors() -> None:
    """Its own puts and those that it has taken over; whether the mirror answers is not shown before the first call."""

    def stat(is_reachable: bool | None, unmirrored: int, short: int, unfetched: int, puts: int) -> EngineStat:
        return EngineStat(
            max_bytes=None, used_bytes=0, pooled_bytes=0, put_count=puts, uncommitted_put_count=0,
            mirror=MirrorStatus(
                url="file:///m", is_reachable=is_reachable, unmirrored_bytes=unmirrored, short_put_count=short,
                unfetched_put_count=unfetched, spilled_bytes=100,
            ),
        )  # fmt: skip

    def values(own: EngineStat, *adopted: EngineStat) -> dict[str, float]:
        return {
            sample.name.removeprefix(prefix): sample.value
            for metric in of_storage("s", own, adopted)
            for sample in metric.samples
            if sample.name.startswith(prefix := "tq_service_storage_mirror_")
        }

    shown = values(stat(True, 10, 1, 0, 7), stat(False, 5, 2, 3, 4), stat(None, 0, 0, 1, 2))
    assert shown == {
        "answers": 0, "unmirrored_bytes": 15, "short_puts": 3, "adopted_puts": 6, "unfetched_puts": 4,
        "spilled_bytes": 300,
    }  # fmt: skip
    assert values(stat(True, 10, 1, 0, 7), stat(None, 0, 0, 1, 2))["answers"] == 1
    assert "answers" not in values(stat(None, 0, 0, 0, 0))


# Who may scrape


def test_nothing_is_served_unless_it_is_asked_for(start_server: StartServer) -> None:
    assert start_server().app.metrics is None


def test_a_port_that_is_taken_is_refused(live: LiveServer, start_server: StartServer) -> None:
    assert live.app.metrics is not None
    with pytest.raises(OSError, match="for metrics: the port is in use"):
        start_server(metrics_port=live.app.metrics.port)


def test_other_machines_need_a_secured_service() -> None:
    with pytest.raises(InvalidArgumentError, match=r"other machines can reach 0\.0\.0\.0"):
        load_settings({"metrics_port": 0, "metrics_host": "0.0.0.0"})
    load_settings({"metrics_host": "0.0.0.0"})
    load_settings({"metrics_port": 0, "metrics_host": "0.0.0.0", "insecure": True})


def test_a_scrape_takes_a_certificate_and_a_token_where_calls_do(
    start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tq_service.audit")
    authority, tokens = Authority(tmp_path / "ca"), tmp_path / "tokens.toml"
    own, prometheus = authority.issue("service"), authority.issue("prometheus")
    secrets = {
        name: add_token(tokens, name, roles, prefixes)
        for name, roles, prefixes in (
            ("may", ["read"], ("",)),
            ("part", ["read"], ("train",)),
            ("role", ["produce"], ("",)),
        )
    }
    live = start_server(
        metrics_port=0,
        tls_cert=str(own.cert),
        tls_key=str(own.key),
        tls_client_ca=str(own.ca),
        auth_tokens_file=str(tokens),
    )
    tls = ssl.create_default_context(cafile=str(own.ca))
    with pytest.raises(OSError):
        fetch(live, tls=tls, Authorization=f"Bearer {secrets['may']}")
    tls.load_cert_chain(str(prometheus.cert), str(prometheus.key))
    assert fetch(live, tls=tls, Authorization=f"Bearer {secrets['may']}").status == 200
    for authorization, reason in (
        ("", "no token"),
        ("Bearer nobody", "unknown token"),
        (f"Bearer {secrets['part']}", "not for all partitions"),
        (f"Bearer {secrets['role']}", "none of the roles admin, read"),
    ):
        answer = fetch(live, tls=tls, Authorization=authorization)
        assert (answer.status, reason in answer.text) == (401, True)
    live.settle()
    noted = [record.getMessage() for record in caplog.records if record.name == "tq_service.audit"]
    assert [line.rpartition("reason=")[2] for line in noted] == [
        '"no token"', '"unknown token"', '"not for all partitions"', '"none of the roles admin, read"'
    ]  # fmt: skip
    with pytest.raises(OSError):  # it is not served without TLS
        fetch(live)


def test_a_scrape_is_refused_while_the_loop_is_busy_and_works_again(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tq_service.observe import endpoint

    monkeypatch.setattr(endpoint, "_SCRAPE_SECONDS", 0.01)
    live = start_server(metrics_port=0)
    assert live.app.metrics is not None
    collect = live.app.metrics._collect

    async def slow() -> Any:
        await asyncio.sleep(30)

    live.app.metrics._collect = slow
    assert fetch(live).status == 503
    live.app.metrics._collect = collect
    monkeypatch.setattr(endpoint, "_SCRAPE_SECONDS", 20)
    assert fetch(live).status == 200


def test_names_follow_the_rules_of_prometheus(live: LiveServer) -> None:
    for family in parse_text(fetch(live).text):
        assert re.fullmatch(r"(tq_service|grpc_server|process)_[a-z0-9_]+", family.name)
        assert family.documentation.endswith(".") or family.name.startswith("process_")
        assert family.type in {"counter", "gauge", "histogram"}
