"""Released versions that are kept here: their services and clients run in processes, from their wheels."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tq_service.testing import ServiceProcess

HERE = Path(__file__).parent
RELEASES = HERE / "releases"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A version that runs from a directory which has the package."""

    path: Path

    @classmethod
    def unpacked(cls, place: Path, to: Path) -> Self:
        """Unpack the wheel of a kept release: a package in an archive cannot read its own files."""
        (wheel,) = place.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(to)
        return cls(path=to)

    @property
    def env(self) -> dict[str, str]:
        """The environment in which `import tq_service` finds this version first."""
        others = os.environ.get("PYTHONPATH", "")
        return {"PYTHONPATH": f"{self.path}{os.pathsep}{others}".rstrip(os.pathsep)}

    @property
    def command(self) -> tuple[str, ...]:
        """The command line of this version, without the current directory on its path."""
        return (sys.executable, "-P", "-m", "tq_service.cli")

    def service(self, *flags: str, **options: Any) -> ServiceProcess:
        """Return a service of this version, to be started."""
        return ServiceProcess(*flags, command=self.command, env=self.env, **options)

    def run(self, command: str, address: str) -> str:
        """Run `program.py` with the client of this version, and return what it printed."""
        run = subprocess.run(
            [sys.executable, HERE / "program.py", command, address],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        if run.returncode:
            raise RuntimeError(f"program.py {command} ended with exit code {run.returncode}: {run.stderr}")
        return run.stdout
