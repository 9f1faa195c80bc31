"""The environments of verl and TransferQueue, one for each tensordict version, and the two systems under them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer_environment import RAY_VERSION, PeerEnvironment
from tq_service.testing import ServiceProcess

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "compat" / "stubs"
TENSORDICT_VERSIONS = ("0.10.0", "0.15.3")
"""The version that both verl 0.9.1 and TransferQueue 0.1.11 allow, and a current one that TransferQueue allows."""

# Imports of verl and TransferQueue. Packages that verl imports for code not used here have stubs in `compat/stubs`,
# which keeps the environment small.
_REQUIREMENTS = (
    f"ray[default]=={RAY_VERSION}",
    "transformers==5.9.0",
    "torchdata",
    "hydra-core",
    "omegaconf",
    "numpy>=2",
    "pandas",
    "pillow",
    "pyzmq",
    "msgspec",
    "psutil",
    "prometheus_client>=0.20",
    "codetiming",
    "dill",
    "cachetools",
    "orjson",
    "tqdm",
    f"--editable={ROOT}",
)
_ALONE = ("verl==0.9.1", "TransferQueue==0.1.11")
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Despite its name: without a cluster beyond this machine, it makes Ray listen on loopback only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Start no workers in advance: each node would start one per CPU.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_DEDUP_LOGS": "0",
    # verl keeps prompts in sets, whose order breaks ties.
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONFAULTHANDLER": "1",
}


def environment(tensordict_version: str) -> PeerEnvironment:
    """Return the environment with a tensordict version."""
    return PeerEnvironment(
        name=f"compat-tensordict-{tensordict_version}",
        requirements=(f"tensordict=={tensordict_version}", *_REQUIREMENTS),
        alone=_ALONE,
        needs_torch=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The package that `import transfer_queue` finds.

    Attributes:
        name: "transfer_queue" or "service".
        variables: environment variables for programs that run over it.
    """

    name: str
    variables: Mapping[str, str]


def transfer_queue() -> System:
    """Return TransferQueue as installed."""
    return System(name="transfer_queue", variables=_variables())


@contextmanager
def service(python: Path, directory: Path, *arguments: str) -> Iterator[System]:
    """Run a service until the block ends, and yield it under TransferQueue's name.

    Args:
        python: interpreter of the environment whose programs run over it.
        directory: directory for its log; checkpoints may go anywhere.
        *arguments: more arguments for `tq-service serve`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with ServiceProcess(*arguments, log=directory / "service.log") as running:
        yield system_at(running.address, python)


def system_at(address: str, python: Path) -> System:
    """Return a running service under TransferQueue's name; `python` as for `service`."""
    command = [str(python), "-m", "tq_service.compat.transfer_queue", "--path"]
    site = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return System(name="service", variables={**_variables(site), "TQ_ADDRESS": address})


def run_program(
    module: str,
    *arguments: str,
    python: Path,
    system: System,
    record: Path,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a program over a system, with its output in a file next to the record.

    Args:
        module: module of the program.
        *arguments: arguments after the first, which is the directory of the record.
        python: interpreter of its environment.
        system: the system to run over.
        record: directory of the record; emptied first.
        variables: more environment variables.

    Raises:
        RuntimeError: the exit code is not 0.
    """
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir(parents=True)
    log = record.with_suffix(".log")
    with log.open("w") as output:
        code = subprocess.run(
            [str(python), "-m", module, str(record), *arguments],
            cwd=ROOT,
            env={**os.environ, **system.variables, **(variables or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if code:
        raise RuntimeError(f"{module} over {system.name} ended with exit code {code}; its output is in {log}")


def _variables(*first: str) -> dict[str, str]:
    return {
        **_VARIABLES,
        "PYTHONPATH": os.pathsep.join([*first, str(ROOT), str(STUBS)]),
        "TQ_LOGGING_LEVEL": "ERROR",
    }
