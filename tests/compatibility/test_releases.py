"""Kept releases and this tree: clients and services of both work together, and old data directories are read.

A failure here breaks a promise of docs/compatibility.md, unless the release is older than the one before this.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from releases import RELEASES, Release

import tq_service as tq

TREE = Release(path=Path(__file__).parents[2])
KEPT = sorted(RELEASES.iterdir())


@pytest.fixture(scope="module", params=KEPT, ids=lambda place: place.name)
def kept(request: pytest.FixtureRequest) -> Path:
    """The directory of a kept release."""
    place: Path = request.param
    return place


@pytest.fixture(scope="module")
def older(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Release:
    return Release.unpacked(kept, tmp_path_factory.mktemp("unpacked"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the client of this tree gets from a service of this tree."""
    return exchanged(TREE, TREE, tmp_path_factory.mktemp("tree"))


def exchanged(client: Release, service: Release, directory: Path) -> Any:
    with service.service(data_dir=directory / "data") as running:
        return json.loads(client.run("exchange", running.address))


def test_the_older_client_works_with_this_service(older: Release, answers: Any, tmp_path: Path) -> None:
    assert exchanged(older, TREE, tmp_path) == answers


def test_this_client_works_with_the_older_service(older: Release, answers: Any, tmp_path: Path) -> None:
    assert answers["large"]
    assert answers["error"][0] == "PARTITION_NOT_FOUND"
    assert exchanged(TREE, older, tmp_path) == answers


def test_the_older_version_is_the_one_that_runs(older: Release, kept: Path) -> None:
    with older.service() as running, tq.Client(running.address) as client:
        version, _, commit = client.status().service.version.partition("+")
    assert version == kept.name
    assert (older.path / "tq_service" / "COMMIT").read_text().startswith(commit)


def test_the_older_data_directory_is_recovered(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept / "data", tmp_path / "data")
    with TREE.service(data_dir=tmp_path / "data") as running:
        assert json.loads(TREE.run("read", running.address)) == json.loads((kept / "expected.json").read_text())
        running.restart()
        with tq.Client(running.address) as client:
            client.restore("all", replace=True)
            assert client.lookup_samples("train")[0].keys[-1] == "h1"


def test_an_older_client_reads_what_this_service_recovered(kept: Path, older: Release, tmp_path: Path) -> None:
    shutil.copytree(kept / "data", tmp_path / "data")
    with TREE.service(data_dir=tmp_path / "data") as running:
        assert json.loads(older.run("read", running.address)) == json.loads((kept / "expected.json").read_text())
