"""Wheel and sdist: what they hold, that they are the same each time, and how PyPI shows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from hatch_build import ReadmeHook
from tq_service.version import VERSION

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
REPOSITORY = "https://git.example/tq"
BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def built(directory: Path, umask: int) -> tuple[Path, Path]:
    """Return a new sdist, and the wheel that was built from it."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT]
    env = {**os.environ, "TQ_COMMIT": "c0ffee", "SOURCE_DATE_EPOCH": "1700000000"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False, umask=umask)
    assert run.returncode == 0, run.stderr
    return next(directory.glob("*.tar.gz")), next(directory.glob("*.whl"))


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return built(tmp_path_factory.mktemp("dist"), 0o022)


def test_a_second_build_has_the_same_bytes(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    again = built(tmp_path, 0o077)
    assert [path.name for path in again] == [path.name for path in distributions]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in distributions]


def test_the_wheel_has_the_package_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        names = {name for name in wheel.namelist() if not name.startswith(f"tq_service-{VERSION}.dist-info/")}
        assert wheel.read("tq_service/COMMIT") == b"c0ffee\n"
    files = [path for path in (ROOT / "tq_service").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert names == {*(str(path.relative_to(ROOT)) for path in files), "tq_service/COMMIT"}


def test_the_sdist_has_what_a_build_needs_and_the_protos(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as sdist:
        names = {name.split("/", 2)[1] for name in sdist.getnames()}
    assert names == {
        *("tq_service", "protos", "pyproject.toml", "hatch_build.py", "PKG-INFO", ".gitignore"),
        *("README.md", "CHANGELOG.md", "LICENSE"),
    }


def test_pypi_accepts_them(distributions: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *distributions]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_its_page_on_pypi_has_the_readme_without_relative_links(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as wheel:
        metadata = Parser().parsestr(wheel.read(f"tq_service-{VERSION}.dist-info/METADATA").decode())
    assert metadata["Version"] == VERSION
    assert metadata["Author"] == "The tq_service authors"
    page = metadata.get_payload()
    assert BLOCK.findall(page) == BLOCK.findall(README)
    assert re.findall(r"\]\((?!https?:)", page) == []


def test_with_a_repository_links_and_images_are_absolute() -> None:
    metadata: dict[str, object] = {"version": VERSION}
    ReadmeHook(str(ROOT), {"repository": f"{REPOSITORY}/"}).update(metadata)
    page = metadata["readme"]["text"]  # type: ignore[index]
    assert BLOCK.findall(page) == BLOCK.findall(README)
    assert f"]({REPOSITORY}/blob/v{VERSION}/docs/performance.md)" in page
    assert f"![The live page]({REPOSITORY}/raw/v{VERSION}/docs/images/live_page.png)" in page
    assert len(re.findall(r"\]\(", page)) == len(re.findall(r"\]\(", README))
    assert metadata["urls"]["Source"] == REPOSITORY  # type: ignore[index]


def test_the_version_is_the_same_wherever_it_is_written_by_hand() -> None:
    """The package's comes from `tq_service/version.py`; a test of the chart compares the chart's."""
    written = re.compile(r'tq-service, newTag: ([\d.]+)|Status:\*\* (\d+\.\d+\.\d+)|image\.version="([\d.]+)"')
    files = [*ROOT.glob("deploy/kubernetes/*/kustomization.yaml"), ROOT / "README.md", ROOT / "docker" / "Dockerfile"]
    found = [(path.parent.name, "".join(version)) for path in files for version in written.findall(path.read_text())]
    assert {version for _, version in found} == {VERSION}
    assert {"single", "ha", "docker", ROOT.name} <= {name for name, _ in found}
