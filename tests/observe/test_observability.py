"""Alerts, dashboard and the files of deploy/observability fit the metrics, and the page that says what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tq_service.client_probes import probes
from tq_service.observe.clients import PrometheusProbe, instrument
from tq_service.observe.service import of_cluster

sys.path.insert(0, str(Path(__file__).parent.parent))
from live_server import LiveServer, LoopThread

ROOT = Path(__file__).parent.parent.parent
OBSERVABILITY = ROOT / "deploy/observability"
CHART_FILES = ROOT / "deploy/helm/tq-service/files"
ALERTS = (CHART_FILES / "alerts.yml").read_text()
DASHBOARD = json.loads((CHART_FILES / "tq_service.json").read_text())
PAGE = (ROOT / "docs/operations.md").read_text()
NAME = re.compile(r"\b(?:tq_service|grpc_server|process)_[a-z_]+\b")
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")


def names_of(text: str) -> set[str]:
    """Return the names of all series of a scrape."""
    families = text_string_to_metric_families(text)
    return {sample.name for family in families for sample in family.samples if not sample.name.endswith("_created")}


def scrape(live: LiveServer, accept: str = "") -> str:
    assert live.app.metrics is not None
    url = f"http://127.0.0.1:{live.app.metrics.port}/metrics"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=20) as answer:
        text: str = answer.read().decode()
        return text


@pytest.fixture(scope="module")
def live(loop_thread: LoopThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A service of which each metric has a series."""
    place = tmp_path_factory.mktemp("data")
    with LiveServer(loop_thread, metrics_port=0, data_dir=str(place), record=f"{place}-recording") as started:
        client = started.client()
        entries = [{"total_lengths": 3, "version": 1}] * 4
        client.put("train@0", {"x": np.arange(4)}, custom_meta=entries)
        rank = {"dp_rank": 0, "dp_size": 1, "batch_index": 0}
        client.get_meta(partition_id="train@0", task_name="t", data_fields=["x"], batch_size=2, **rank)
        client.publish_version(1)
        assert started.app.metrics is not None
        collect = started.app.metrics._collect

        async def with_cluster() -> list[Metric]:
            return [*await collect(), *of_cluster("runs", {"c2": 0})]

        started.app.metrics._collect = with_cluster  # tests/cluster has a real one
        yield started


@pytest.fixture(scope="module")
def mirrored(loop_thread: LoopThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A storage service with a mirror, which has answered."""
    mirror = f"file://{tmp_path_factory.mktemp('mirror')}"
    with (
        LiveServer(loop_thread, role="controller") as controller,
        LiveServer(
            loop_thread, metrics_port=0, role="storage", controller=controller.address, mirror=mirror
        ) as storage,
    ):
        controller.client().put("train", {"x": np.arange(4)})
        until = time.monotonic() + 60.0
        while "mirror_answers" not in scrape(storage):
            assert time.monotonic() < until
            time.sleep(0.05)
        yield storage


@pytest.fixture(scope="module")
def known(live: LiveServer, mirrored: LiveServer) -> set[str]:
    registry = CollectorRegistry()
    probe = PrometheusProbe(registry)
    probe.claimed(1.0, "batch")
    probe.stepped((("work", 1.0),))
    return names_of(scrape(live)) | names_of(scrape(mirrored)) | names_of(generate_latest(registry).decode())


def expressions() -> list[str]:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len(panels) > 20
    queries = [
        variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"
    ]
    return queries + [target["expr"] for panel in panels for target in panel["targets"]]


def test_dashboard_and_alerts_name_metrics_that_exist(known: set[str]) -> None:
    named = {name for text in [ALERTS, *expressions()] for name in NAME.findall(text)}
    assert len(named) > 40
    assert named - known == set()


def test_each_metric_is_on_the_page(known: set[str]) -> None:
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known}
    missing = {name for name in families if not name.startswith("process_") and f"`{name}`" not in PAGE}
    assert missing == set()
    assert {name for name in NAME.findall(PAGE) if name != "process_"} <= families | known


def test_each_alert_has_its_section() -> None:
    alerts = re.findall(r"- alert: (\w+)", ALERTS)
    assert re.findall(r"^### (Tq\w+)$", PAGE, re.MULTILINE) == alerts
    assert re.findall(r"runbook: docs/operations\.md#(\w+)", ALERTS) == [alert.lower() for alert in alerts]


def test_services_of_one_prometheus_are_not_merged() -> None:
    """By their namespaces and instances: partitions, tasks and samplers of two services may have the same names."""
    sums = re.findall(r"\bby \(([^)]*)\)", ALERTS)
    assert len(sums) > 10
    assert all(by.startswith("namespace, ") for by in sums)
    assert all("instance" in by for by in sums if by != "namespace, cluster")  # of which the instances are the members
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    for name in ("namespace", "instance", "group"):
        assert (variables[name]["includeAll"], variables[name]["allValue"]) == (True, ".*")
    for expression in expressions():
        for name, chosen in re.findall(rf"({NAME.pattern})(\{{.*?\}})?", expression):
            if not name.startswith(("tq_service_client_", "tq_service_loader_", "tq_service_build_info")):
                assert 'namespace=~"$namespace", instance=~"$instance"' in chosen, expression


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_images_are_pinned_and_published_to_this_machine_alone() -> None:
    text = (ROOT / "compose.yaml").read_text()
    images = re.findall(r"image: ((?:prom|grafana)/\S+)", text)
    assert len(images) == 2
    assert all(re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", image) for image in images)
    assert all(ports.startswith('"127.0.0.1:') for ports in re.findall(r"ports: \[(.*)\]", text))


# With Prometheus's own tool


def promtool(*arguments: str, text: str | None = None) -> str:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], input=text, capture_output=True, text=True, timeout=60, cwd=OBSERVABILITY, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", str(CHART_FILES / "alerts.yml")),
        ("test", "rules", "alerts_test.yml"),
        ("check", "config", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_files(arguments: tuple[str, ...]) -> None:
    assert "SUCCESS" in promtool(*arguments)


@needs_promtool
def test_promtool_accepts_a_scrape(live: LiveServer, mirrored: LiveServer) -> None:
    for service in (live, mirrored):
        assert promtool("check", "metrics", text=scrape(service)) == ""


# Clients and loaders


class Recorder:
    """A registry's values, by name."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def __getitem__(self, name: str) -> Any:
        return self.registry.get_sample_value(f"tq_service_{name}")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    instrument(recorder.registry)
    instrument(recorder.registry)  # which does nothing
    yield recorder
    probes.clear()


def test_calls_of_clients_are_measured(live: LiveServer, client_kind: Any, recorder: Recorder) -> None:
    client = live.client(client_kind)
    client.put(f"measured-{client_kind}", {"x": np.arange(8)})
    meta = client.get_meta(
        partition_id=f"measured-{client_kind}", task_name="t", data_fields=["x"], batch_size=4, max_wait=5.0
    )
    client.get_data(meta)
    assert (recorder["client_put_seconds_count"], recorder["client_put_bytes_total"]) == (1, 64)
    assert (recorder["client_fetch_seconds_count"], recorder["client_fetched_bytes_total"]) == (1, 32)
    claims = recorder.registry.get_sample_value("tq_service_client_claim_seconds_count", {"status": "batch"})
    assert claims == 1


def test_waits_for_a_loader_are_measured(live: LiveServer, recorder: Recorder) -> None:
    pytest.importorskip("torch")
    from tq_service.data import StreamingDataLoader, StreamingDataset

    client = live.client()
    client.put("loaded", {"x": np.arange(8)})
    client.seal_partition("loaded")
    dataset = StreamingDataset(
        live.address, batch_size=4, micro_batch_size=2, data_fields=["x"], partition_id="loaded", task_name="t",
        dp_rank=0, dp_size=1,
    )  # fmt: skip
    with StreamingDataLoader(dataset) as loader:
        assert len(list(loader)) == 4
    assert recorder["loader_micro_batches_total"] == 4
    assert recorder["loader_wait_seconds_total"] > 0
    assert recorder["loader_work_seconds_total"] >= 0


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_what_workers_of_a_loader_fetch_counts_in_their_parent(
    live: LiveServer, recorder: Recorder, method: str
) -> None:
    pytest.importorskip("torch")
    from tq_service.data import StreamingDataLoader, StreamingDataset

    live.client().put(f"loaded-{method}", {"x": np.arange(8)})
    live.client().seal_partition(f"loaded-{method}")
    dataset = StreamingDataset(
        live.address, batch_size=4, micro_batch_size=2, data_fields=["x"], partition_id=f"loaded-{method}",
        task_name="t", dp_rank=0, dp_size=1,
    )  # fmt: skip
    with StreamingDataLoader(dataset, num_workers=2, multiprocessing_context=method) as loader:
        assert len(list(loader)) == 4
    assert recorder["client_fetch_seconds_count"] == 2
    assert recorder["client_fetched_bytes_total"] == 64
    claims = recorder.registry.get_sample_value("tq_service_client_claim_seconds_count", {"status": "batch"})
    assert claims == 2
    assert recorder["loader_micro_batches_total"] == 4  # which the parent notes itself


def test_a_loader_that_is_left_early_ends_what_it_has_open(live: LiveServer, recorder: Recorder) -> None:
    from tq_service.client_probes import timed

    ended = []

    def items() -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            ended.append(True)

    for item in timed(items()):
        if item == 2:
            break
    else:
        pytest.fail("it did not yield")
    import gc

    gc.collect()
    assert ended == [True]
    assert recorder["loader_micro_batches_total"] == 3
    probes.clear()
    assert list(timed(range(3))) == [0, 1, 2]
