"""Run some tests over the wheel in clean environments without torch: `scripts/other_pythons.py 3.12 3.13`.

    scripts/other_pythons.py 3.12 3.13       # each with the newest dependencies
    scripts/other_pythons.py --lowest 3.11   # with the lower bounds of pyproject.toml

A version without an interpreter is reported and skipped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
ENVIRONMENTS: Final = ROOT / ".venv-versions"
EXTRAS: Final = ("uvloop", "metrics", "traces", "valkey")
TESTS: Final = (
    "balancing/test_karmarkar_karp.py",
    "samplers",
    "core/test_domain_partition.py",
    "core/test_domain_rows.py",
    "wire/test_wire_columns.py",
    "wire/test_frames.py",
    "client/test_batch_meta.py",
    "client/test_results.py",
    "rpc/test_rpc_auth.py",
    "compatibility/test_releases.py",
)


def find_python(version: str) -> Path | None:
    """Return a working interpreter of a version, from PATH or pyenv, or None if there is none."""
    found = [shutil.which(f"python{version}")]
    if pyenv := shutil.which("pyenv"):
        prefix = subprocess.run([pyenv, "prefix", version], capture_output=True, text=True, check=False)
        found.append(f"{prefix.stdout.strip()}/bin/python")
    for path in filter(None, found):
        command = [path, "-c", f"import sys; assert sys.version.startswith('{version}.')"]
        try:
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return Path(path)
        except OSError:  # the file does not exist
            continue
    return None


def requirements(*, lowest: bool) -> list[str]:
    """Return the dependencies of the package and its extras, and the test tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    found = [*project["project"]["dependencies"], *(each for extra in EXTRAS for each in extras[extra])]
    pinned = [each.replace(">=", "==") for each in found] if lowest else found
    return [*pinned, *project["dependency-groups"]["test"]]


def install(python: Path, environment: Path, wheel: Path, *, lowest: bool) -> None:
    """Create an environment with the wheel, its dependencies and the test tools."""
    subprocess.run([python, "-m", "venv", "--clear", environment], check=True)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *requirements(lowest=lowest)], check=True)
    subprocess.run([*pip, "--no-deps", wheel], check=True)


def main() -> int:
    """Return 1 if a test fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="Python versions, such as 3.12")
    parser.add_argument("--lowest", action="store_true", help="install the lowest versions of the dependencies")
    arguments = parser.parse_args()
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    failed = []
    for version in arguments.versions:
        python = find_python(version)
        if python is None:
            print(f"Python {version} is not installed: skipped", flush=True)
            continue
        name = f"{version}-lowest" if arguments.lowest else version
        with tempfile.TemporaryDirectory() as directory:
            build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", directory]
            subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            install(python, ENVIRONMENTS / name, next(Path(directory).glob("*.whl")), lowest=arguments.lowest)
        print(f"Python {name}:", flush=True)
        # -P: the package is that of the environment, not of the current directory.
        pytest = [ENVIRONMENTS / name / "bin" / "python", "-P", "-m", "pytest", "--quiet", "-p", "no:cacheprovider"]
        tests = [f"tests/{test}" for test in TESTS]
        run = subprocess.run([*pytest, "-m", "not nightly", *tests], cwd=ROOT, env=env, check=False)
        if run.returncode:
            failed.append(name)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
