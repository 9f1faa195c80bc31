"""What people see of mirrors: whether they answer, what has no copies, and what was taken over; nothing without one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tq_service.cli import app, options
from tq_service.cli.status import header_of
from tq_service.results import MirrorStatus, Revision, ServiceInfo, ServiceStatus, StorageStatus

SERVICE = ServiceInfo(
    instance_id=b"i" * 16, version="1.2.3", role="controller", uptime_seconds=61.0, durability="process", data_dir="",
    tls=False, client_certificates=False, auth=False, shared_memory=True,
)  # fmt: skip


def mirror(is_reachable: bool | None = True, **values: int) -> MirrorStatus:
    given = {"unmirrored_bytes": 0, "short_put_count": 0, **values}
    return MirrorStatus(url="s3://bucket/prefix", is_reachable=is_reachable, **given)


def storage(name: str, number: int, **values: Any) -> StorageStatus:
    given = {
        "address": f"10.0.0.{number}:50052", "used_bytes": 1_200_000, "max_bytes": 256_000_000, "put_count": 12,
        "version": "1.2.3", "heard_ago_seconds": 1.2, "is_silent": False, **values,
    }  # fmt: skip
    return StorageStatus(storage_id=name, **given)


def status(*storages: StorageStatus) -> ServiceStatus:
    revision = Revision(instance_id=b"r" * 16, number=1)
    return ServiceStatus(service=SERVICE, storages=storages, partitions=(), waits=(), revision=revision)


PLAIN = (storage("storage-0", 1), storage("storage-1", 2, is_silent=True))
MIRRORED = (
    storage("storage-0", 1, mirror=mirror(is_reachable=False, unmirrored_bytes=3_400_000, short_put_count=1_234)),
    storage("storage-1", 2, is_adopted=True, put_count=7, max_bytes=None, mirror=mirror(None, unfetched_put_count=3)),
    storage("storage-2", 2, mirror=mirror()),
    storage("storage-3", 3),
)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(options, "_PIPED_WIDTH", 80)


def listed(monkeypatch: pytest.MonkeyPatch, *storages: StorageStatus, arguments: tuple[str, ...] = ()) -> str:
    @contextlib.contextmanager
    def open_client(**_: Any) -> Iterator[Any]:
        yield SimpleNamespace(status=lambda explain: status(*storages), address="controller:50051")

    monkeypatch.setattr(options, "open_client", open_client)
    result = CliRunner().invoke(app, ["storage", "ls", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def words(shown: str) -> list[str]:
    """Return the lines without what the columns are filled up with."""
    return [" ".join(line.split()) for line in shown.splitlines()]


def test_storage_ls_shows_mirrors_below_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = listed(monkeypatch, *MIRRORED)
    assert max(map(len, shown.splitlines())) <= 80
    assert words(shown) == [
        "storage address used quota puts heard state",
        "storage-0 10.0.0.1:50052 1.2 MB 256.0 MB 12 1 s ago takes puts",
        "storage-1 10.0.0.2:50052 - - 7 1 s ago taken over by",
        "storage-2",
        "storage-2 10.0.0.2:50052 1.2 MB 256.0 MB 12 1 s ago takes puts",
        "storage-3 10.0.0.3:50052 1.2 MB 256.0 MB 12 1 s ago takes puts",
        "",
        "storage mirror answers unmirrored few copies unfetched",
        "storage-0 s3://bucket/prefix no 3.4 MB 1,234 0",
        "storage-1 s3://bucket/prefix - 0 bytes 0 3",
        "storage-2 s3://bucket/prefix yes 0 bytes 0 0",
    ]
    as_json = json.loads(listed(monkeypatch, *MIRRORED, arguments=("--json",)))
    assert [each["is_adopted"] for each in as_json] == [False, True, False, False]
    assert as_json[1]["mirror"]["unfetched_put_count"] == 3


def test_what_has_left_memory_is_shown_where_some_has(monkeypatch: pytest.MonkeyPatch) -> None:
    spilling = storage("storage-0", 1, mirror=mirror(spilled_bytes=5_600_000))
    shown = listed(monkeypatch, spilling, storage("storage-1", 2, mirror=mirror()))
    assert max(map(len, shown.splitlines())) <= 80
    assert words(shown)[-3:] == [
        "storage mirror answers unmirrored few copies unfetched spilled",
        "storage-0 s3://bucket/pre… yes 0 bytes 0 0 5.6 MB",
        "storage-1 s3://bucket/pre… yes 0 bytes 0 0 0 bytes",
    ]
    header = header_of(status(spilling), "controller:50051")
    assert header[3:] == ["mirror answers, 0 bytes unmirrored, 0 puts lacking copies, 5.6 MB mirror-only"]


def test_a_successor_that_has_not_registered_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "taken over by another service" in " ".join(words(listed(monkeypatch, MIRRORED[1])))


def test_storage_ls_without_mirrors_is_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert words(listed(monkeypatch, *PLAIN)) == [
        "storage address used quota puts heard state",
        "storage-0 10.0.0.1:50052 1.2 MB 256.0 MB 12 1 s ago takes puts",
        "storage-1 10.0.0.2:50052 1.2 MB 256.0 MB 12 1 s ago silent",
    ]


def test_the_header_of_status_sums_mirrors_up_and_counts_no_byte_twice() -> None:
    lines = header_of(status(*MIRRORED), "controller:50051")
    assert max(map(len, lines)) <= 80
    assert " ".join(lines[2:]) == (
        "storage 3.6 MB of 768.0 MB in 3 storage services "
        "mirror does not answer 1 of 2 storage services, 3.4 MB unmirrored, 1,234 puts lacking copies "
        "7 puts taken over from lost storage services, 3 not fetched yet"
    )
    fine = header_of(status(storage("a", 1, mirror=mirror(short_put_count=1))), "controller:50051")
    assert fine[3:] == ["mirror answers, 0 bytes unmirrored, 1 put lacking copies"]
    new = header_of(status(storage("a", 1, mirror=mirror(None))), "controller:50051")
    assert new[3:] == ["mirror not contacted yet, 0 bytes unmirrored, 0 puts lacking copies"]
    assert header_of(status(*PLAIN), "c:1")[2:] == ["storage 2.4 MB of 512.0 MB in 2 storage services, 1 silent"]
