"""The memory available to this process: the machine's memory, unless a control group imposes a lower limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_FILES = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Return the memory available to the process.

    This is the machine's memory or, if lower, the lowest limit of the process's control groups.

    Control groups limit containers, Slurm job steps, and systemd services and scopes. Versions 1 and 2 of control
    groups are supported. In a cgroup namespace, only the groups at or below the namespace's root are visible.

    Args:
        root: directory that contains `proc` and the mount points of control groups.
    """
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine_bytes, *_group_limits(root)])


def _group_limits(root: Path) -> Iterator[int]:
    own_groups = _own_groups(root)
    for kind, mounted_group, mount_point in _mounts(root):
        top = root / mount_point.lstrip("/")
        try:
            below = PurePosixPath(own_groups[kind]).relative_to(mounted_group)
        except (KeyError, ValueError):  # the mount shows other groups or, as in a container, starts at this group
            below = PurePosixPath()
        if ".." in below.parts:
            below = PurePosixPath()
        group = top / below
        for directory in (group, *list(group.parents)[: len(below.parts)]):
            try:
                yield int((directory / _FILES[kind]).read_text())
            except (OSError, ValueError):  # the root group has no limit file, or the limit is "max" (unlimited)
                continue


def _own_groups(root: Path) -> dict[str, str]:
    """Return this process's cgroup in each hierarchy that may limit memory, keyed by file system type."""
    groups = {}
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if "memory" in controllers.split(","):
            groups["cgroup"] = group
        elif hierarchy == "0" and not controllers:
            groups["cgroup2"] = group
    return groups


def _mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the type, group and path of each mount with memory limits, or the usual mounts if mountinfo is missing."""
    lines = _lines(root / "proc/self/mountinfo")
    if not lines:
        yield "cgroup2", "/", "/sys/fs/cgroup"
        yield "cgroup", "/", "/sys/fs/cgroup/memory"
    for line in lines:
        match line.partition(" - ")[0].split(), line.partition(" - ")[2].split():
            case [_, _, _, group, place, *_], ["cgroup2" | "cgroup" as kind, _, options]:
                if kind == "cgroup2" or "memory" in options.split(","):
                    yield kind, _unescaped(group), _unescaped(place)


def _unescaped(path: str) -> str:
    for escape, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        path = path.replace(escape, character)
    return path


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
