"""LICENSE is the text that pyproject.toml names, goes into the wheel, and SECURITY.md says how to report."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
APACHE_2_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""Of https://www.apache.org/licenses/LICENSE-2.0.txt."""


def test_the_license_is_the_unmodified_text_that_pyproject_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2_SHA256


def test_the_images_are_built_with_it() -> None:
    """A build without a file that pyproject.toml names fails."""
    assert "!LICENSE" in (ROOT / ".dockerignore").read_text().split()
    for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY pyproject.toml"):
            assert "LICENSE" in line.split()


def test_vulnerabilities_are_reported_in_private() -> None:
    policy = (ROOT / "SECURITY.md").read_text()
    assert "private vulnerability reporting" in policy
    assert "Supported versions" in policy
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text()
