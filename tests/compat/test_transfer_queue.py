"""The package `transfer_queue` in TransferQueue's place: files of `place` run with the package first on the path."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tq_service.compat.transfer_queue import SITE

PLACE = Path(__file__).parent / "place"
NAMES = sorted(path.stem for path in PLACE.glob("place_*.py"))

pytestmark = pytest.mark.timeout(420)


def run(*command):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(SITE), str(Path(__file__).parents[1])])
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """One process runs all files: most of the time of one goes into the import of torch."""
    report = tmp_path_factory.mktemp("place") / "report.xml"
    files = [str(PLACE / f"{name}.py") for name in NAMES]
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(report), *files)
    return done, ElementTree.parse(report)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.removeprefix("place_"))
def test_in_its_place(outcomes, name):
    done, report = outcomes
    tests = [test for test in report.iter("testcase") if test.attrib["classname"].endswith(name)]
    failed = [test.attrib["name"] for test in tests if {each.tag for each in test} & {"failure", "error"}]
    assert tests and not failed, done.stdout + done.stderr


def test_nothing_else_fails(outcomes):
    done, _ = outcomes
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_prints_where_it_is():
    assert run("-m", "tq_service.compat.transfer_queue", "--path").stdout.strip() == str(SITE)
    assert [each.name for each in SITE.iterdir()] == ["transfer_queue"]
