"""Makes the files of this version that later versions are tested against: `python tests/compatibility/make_release.py`.

They are the wheel, a data directory that its service wrote and did not close, and `expected.json`: what its client read
from that. They are made once per release and kept. Until 0.1.0 is released, the command replaces the files of 0.1.0.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from releases import RELEASES, Release

from tq_service.version import VERSION

ROOT = Path(__file__).parents[2]
NOT_KEPT = shutil.ignore_patterns("lock", "reserve")  # of the running service


def main() -> None:
    """Replace the directory of this version."""
    place = RELEASES / VERSION
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", place], cwd=ROOT, check=True
    )
    with tempfile.TemporaryDirectory() as directory:
        release = Release.unpacked(place, Path(directory) / "unpacked")
        data_dir = Path(directory) / "data"
        with release.service(data_dir=data_dir) as service:
            release.run("write", service.address)
            service.kill()
            shutil.copytree(data_dir, place / "data", ignore=NOT_KEPT)
            service.start()
            (place / "expected.json").write_text(release.run("read", service.address))


if __name__ == "__main__":
    main()
