"""Hooks of hatchling: wheel and sdist have their commit in `tq_service/COMMIT`, and a README without relative links."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:)(?P<path>[^)]+)\)")


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


class ReadmeHook(MetadataHookInterface):
    """Adds the README and the addresses of the project, from the setting `repository`.

    A package index shows the README alone: relative links become absolute ones to the tag of this version. Without a
    repository they become plain text, and images are left out.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`."""
        repository = self.config["repository"].rstrip("/")
        tag = f"v{metadata['version']}"

        def absolute(link: re.Match[str]) -> str:
            if not repository:
                return "" if link["image"] else link["text"]
            kind = "raw" if link["image"] else "blob"
            return f"{link['image']}[{link['text']}]({repository}/{kind}/{tag}/{link['path']})"

        text = _LINK.sub(absolute, (Path(self.root) / "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = (
            {
                "Source": repository,
                "Documentation": f"{repository}/tree/{tag}/docs",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
            if repository
            else {}
        )


def _head_of(root: str) -> str:
    command = ["git", "-C", root, "rev-parse", "HEAD"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except OSError:  # git is not installed
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""
