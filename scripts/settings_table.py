"""Write the settings table into the documents that have a place for it; `--check` compares without writing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from tq_service.config import ENV_PREFIX, ServeSettings, format_setting

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("docs/settings.md",)
BEGIN, END = "<!-- settings: begin, by scripts/settings_table.py -->", "<!-- settings: end -->"


def table() -> str:
    """Return a Markdown table for each section, one row per setting."""
    lines: list[str] = []
    section = None
    for name, field in ServeSettings.model_fields.items():
        if section != (section := ServeSettings.section_of(name)):
            lines += ["", f"## {section}", "", "| setting | environment | default | meaning |", "|---|---|---|---|"]
        # Markdown would read <uid> as a tag.
        meaning, _, computed = (field.description or "").replace("<", "&lt;").partition(" Default: ")
        if computed:
            default = computed.rstrip(".")
        else:
            default = "" if field.default is None else f"`{format_setting(name, field.default)}`"
        choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
        values = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
        flag = f"`--{name.replace('_', '-')}`"
        lines.append(f"| {flag} | `{ENV_PREFIX}{name.upper()}` | {default} | {meaning}{values} |")
    return "\n".join([*lines[1:], ""])


def main(arguments: list[str]) -> int:
    """Update or compare; return the exit code."""
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text() if path.exists() else ""
        if BEGIN not in text:
            continue
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        current = f"{before}{BEGIN}\n{table()}\n{END}{after}"
        if current != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(current)
    if stale and "--check" in arguments:
        print(f"settings table stale in {', '.join(stale)}: run 'make generate'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
