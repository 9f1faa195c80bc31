"""The package `transfer_queue` in TransferQueue's place: files of `place` run with the package first on the path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tq_service.compat.transfer_queue import SITE

PLACE = Path(__file__).parent / "place"


def run(*command, **more):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(SITE), str(Path(__file__).parents[1])])
    return subprocess.run(
        [sys.executable, *command],
        env={**environment, **more},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.parametrize("path", sorted(PLACE.glob("place_*.py")), ids=lambda path: path.stem.removeprefix("place_"))
def test_in_its_place(path):
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_prints_where_it_is():
    assert run("-m", "tq_service.compat.transfer_queue", "--path").stdout.strip() == str(SITE)
    assert [each.name for each in SITE.iterdir()] == ["transfer_queue"]


def test_the_import_does_without_ray_and_omegaconf():
    done = run("-c", "import sys, transfer_queue; print(sorted({'ray', 'omegaconf'} & set(sys.modules)))")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_variable_says_how_long_a_stream_pauses():
    program = (
        "from transfer_queue.dataloader import streaming_dataset as module; "
        "print(module.TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL)"
    )
    answers = [run("-c", program, **more) for more in ({}, {"TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL": "0.25"})]
    assert [answer.stdout.strip() for answer in answers] == ["1.0", "0.25"], answers
