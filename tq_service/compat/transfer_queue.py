"""Directory of the `transfer_queue` package that replaces TransferQueue. Put the directory first on PYTHONPATH.

python -m tq_service.compat.transfer_queue --path
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

SITE: Final = Path(__file__).parent / "site"
"""The directory to put on PYTHONPATH. It contains only the `transfer_queue` package."""


def main() -> None:
    """Print the directory that contains the `transfer_queue` package."""
    parser = argparse.ArgumentParser(prog="python -m tq_service.compat.transfer_queue", description=__doc__)
    parser.add_argument("--path", action="store_true", required=True, help="print the directory to put on PYTHONPATH")
    parser.parse_args()
    print(SITE)


if __name__ == "__main__":
    main()
