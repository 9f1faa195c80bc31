"""Describes the machine of the measurements."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = ("tq-service", "grpcio", "protobuf", "uvloop", "numpy", "torch", "tensordict")


def describe_machine() -> dict[str, str]:
    """Return hardware, system and versions by label."""
    facts = {
        "processor": f"{_processor()}, {usable_cores()} cores usable of {psutil.cpu_count(logical=True) or 0}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load before": " ".join(f"{load:.2f}" for load in psutil.getloadavg()),
        "python": sys.version.split()[0],
    }
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(logical=True) or 1


def _processor() -> str:
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
