"""Build hook of hatchling: a wheel or sdist has the commit it was built from in `tq_service/COMMIT`."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface[Any]):
    """Adds the commit: that of the environment variable TQ_COMMIT, else that of the clone.

    A wheel that is built from an sdist takes over its file. An editable install has none, and reads the clone.
    """

    _directory: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file, before the archive is written."""
        if version == "editable" or (Path(self.root) / "tq_service" / "COMMIT").exists():
            return
        commit = os.environ.get("TQ_COMMIT") or _head_of(self.root)
        if not commit:
            return
        self._directory = tempfile.TemporaryDirectory()
        written = Path(self._directory.name) / "COMMIT"
        written.write_text(f"{commit}\n")
        build_data["force_include"][str(written)] = "tq_service/COMMIT"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary file, after the archive is written."""
        if self._directory is not None:
            self._directory.cleanup()


def _head_of(root: str) -> str:
    command = ["git", "-C", root, "rev-parse", "HEAD"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except OSError:  # git is not installed
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""
