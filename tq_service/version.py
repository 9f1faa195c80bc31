"""The package version and the protocol version, which services and clients exchange."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

VERSION: Final = "0.1.0"

PROTOCOL: Final = 4
"""Protocol version, incremented when older peers would misread a change to the protos or to a byte layout.

`make accept-protos` increments the version if `buf breaking` finds such a change.
"""

_PACKAGE: Final = Path(__file__).parent
_COMMIT_LENGTH: Final = 9


def _commit() -> str:
    """Return the commit this package was built from, or the one checked out in its git clone, or "" if unknown."""
    try:
        return (_PACKAGE / "COMMIT").read_text().strip()  # written by hatch_build.py
    except OSError:
        pass
    try:
        return _head_of(_PACKAGE.parent)
    except OSError:
        return ""


def _head_of(clone: Path) -> str:
    """Read a clone's checked-out commit directly from its files, because git may not be installed.

    Raises:
        OSError: the directory is not a git clone.
    """
    git = clone / ".git"
    if git.is_file():  # in a worktree, this file names the git directory, which shares the branches of the main clone
        git = clone / git.read_text().removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head
    branch = head.removeprefix("ref:").strip()
    common = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
    if (common / branch).exists():
        return (common / branch).read_text().strip()
    packed = re.search(rf"^([0-9a-f]+) {re.escape(branch)}$", (common / "packed-refs").read_text(), re.MULTILINE)
    return "" if packed is None else packed[1]


COMMIT: Final = _commit()[:_COMMIT_LENGTH]
BUILD: Final = f"{VERSION}+{COMMIT}" if COMMIT else VERSION
"""The version and commit as a PEP 440 local version, such as "0.1.0+64c3520ab"."""

USER_AGENT: Final = f"tq-service/{BUILD} (protocol {PROTOCOL})"
"""Prefix of the user agent sent with every call. It tells the service the caller's protocol version."""
