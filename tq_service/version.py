"""The version of the package and of its protocol, which services and clients show each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

VERSION: Final = "0.1.0"

PROTOCOL: Final = 3
"""Raised with each change of the protos or of a byte layout after which older clients or services misread each other.

`make accept-protos` raises it when `buf breaking` finds such a change.
"""

_PACKAGE: Final = Path(__file__).parent
_COMMIT_LENGTH: Final = 9


def _commit() -> str:
    """Return the commit this package was built from, or that of the clone it is in; "" if neither is known."""
    try:
        return (_PACKAGE / "COMMIT").read_text().strip()  # written by hatch_build.py
    except OSError:
        pass
    try:
        return _head_of(_PACKAGE.parent)
    except OSError:
        return ""


def _head_of(clone: Path) -> str:
    """Return the commit that is checked out, read from the files of git, which may not be installed.

    Raises:
        OSError: it is not a clone.
    """
    git = clone / ".git"
    if git.is_file():  # a worktree: the file names its directory, which shares the branches of another one
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
"""The version with the commit, such as "0.1.0+64c3520ab", as PEP 440 writes local versions."""

USER_AGENT: Final = f"tq-service/{BUILD} (protocol {PROTOCOL})"
"""Begins the user agent of all calls, from which a service knows the protocol of its caller."""
