"""The service of the tree of this program, for `compare`: it refuses to run another tree's.

The trees share one virtual environment, and the package is also installed there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tq_service
from benchmarks.harness import ROOT


def checked_package() -> str:
    """Return the directory of the imported package.

    Raises:
        RuntimeError: it is not this tree's package.
    """
    package = Path(tq_service.__file__).resolve().parent
    if package != ROOT / "tq_service":
        raise RuntimeError(
            f"imported {package}, expected {ROOT / 'tq_service'}: run it as a module, in its tree's directory"
        )
    return str(package)


if __name__ == "__main__":
    from tq_service.cli import main

    checked_package()
    sys.exit(main())
