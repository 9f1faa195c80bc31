"""Raises PROTOCOL in `tq_service/version.py` by one, after a change of the protos that older versions misread."""

from __future__ import annotations

import re
from pathlib import Path

VERSION_FILE = Path(__file__).parents[1] / "tq_service" / "version.py"


def main() -> None:
    """Rewrite the file."""
    text, count = re.subn(
        r"^(PROTOCOL: Final = )(\d+)$",
        lambda match: f"{match[1]}{int(match[2]) + 1}",
        VERSION_FILE.read_text(),
        flags=re.MULTILINE,
    )
    if count != 1:
        raise SystemExit(f"{VERSION_FILE} has {count} lines PROTOCOL; expected one")
    VERSION_FILE.write_text(text)


if __name__ == "__main__":
    main()
