"""Virtual environments of the peers, created on first use and separate from ours and from each other."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
# Installed first in environments that need torch, as `TORCH` of the Makefile. On Linux, PyPI's build is for CUDA and
# takes several GB, so the user chooses the build.
_TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEnvironment:
    """A virtual environment of one peer.

    Attributes:
        name: name of the peer.
        requirements: requirements for pip.
        alone: requirements that pip installs afterwards, without their dependencies.
        needs_torch: whether torch is installed first, in a separate step.
        variables: environment variables for its programs.
    """

    name: str
    requirements: Sequence[str]
    alone: Sequence[str] = ()
    needs_torch: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def python(self) -> Path:
        """Return the path of its Python; create the environment if it is missing or its requirements have changed.

        Raises:
            RuntimeError: it could not be created.
        """
        directory = _ROOT / f".venv-{self.name.lower()}"
        python, installed = directory / "bin" / "python", directory / "installed.txt"
        wanted = "\n".join([*self.requirements, *self.alone])
        if python.exists() and installed.exists() and installed.read_text() == wanted:
            return python
        print(f"installing {self.name} in {directory.name}: takes some minutes, once only", file=sys.stderr, flush=True)
        _run([sys.executable, "-m", "venv", "--clear", str(directory)])
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if self.needs_torch:
            _run([*pip, *shlex.split(os.environ.get("TQ_BENCH_TORCH", _TORCH))])
        _run([*pip, *self.requirements])
        if self.alone:
            _run([*pip, "--no-deps", *self.alone])
        installed.write_text(wanted)
        return python


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip() or done.stdout.strip()
        raise RuntimeError(f"`{' '.join(command)}` ended with exit code {done.returncode}: {reason[-500:]}")


RAY_VERSION = "2.60.0"
_RAY = f"ray=={RAY_VERSION}"
# The second has a misleading name: without clusters, it makes Ray listen on loopback only. It does the same for a
# caller that asks Ray for the address of the node, such as TransferQueue.
_RAY_VARIABLES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

TRANSFER_QUEUE = PeerEnvironment(
    name="TransferQueue",
    requirements=("TransferQueue==0.1.11", _RAY, f"--editable={_ROOT}"),
    needs_torch=True,
    variables={
        **_RAY_VARIABLES,
        "TQ_LOGGING_LEVEL": "ERROR",
        "TQ_NUM_THREADS": str(os.cpu_count() or 1),
        "TQ_SOCKET_POOL_SIZE": "64",
    },
)
RAY = PeerEnvironment(name="Ray", requirements=(_RAY, "numpy>=1.26"), variables=_RAY_VARIABLES)
PEER_NAMES = (TRANSFER_QUEUE.name, RAY.name)
