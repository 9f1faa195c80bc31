"""The flags of `serve`, one for each setting, and the table that --show-config prints."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args

import typer

from tq_service.cli.options import option, with_options
from tq_service.cli.output import print_json, print_table
from tq_service.config import ENV_PREFIX, LoadedSettings, ServeSettings, format_setting


def with_setting_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Give `function` one option for each setting, after the parameters it names itself and in place of **settings."""
    return with_options(function, [_flag(name) for name in ServeSettings.model_fields])


def _flag(name: str) -> inspect.Parameter:
    field = ServeSettings.model_fields[name]
    kind: Any = field.annotation
    metavar: str | None = None
    if get_args(kind) and all(isinstance(choice, str) for choice in get_args(kind)):
        metavar = "|".join(get_args(kind))
    if name.endswith("_bytes"):
        metavar = "SIZE"
    # The settings validate, so that a value is judged alike wherever it comes from; only numbers and switches keep
    # their type, since it shows in the help.
    kind = kind if kind in (int, float, bool) and metavar is None else str
    has_default_text = (
        field.default_factory is not None or field.default is None or "Default:" in (field.description or "")
    )
    default = "" if has_default_text else f" [default: {format_setting(name, field.default)}]"
    info = typer.Option(
        help=f"{field.description}{default}",
        metavar=metavar,
        show_default=False,
        rich_help_panel=ServeSettings.section_of(name),
    )
    return option(name, kind, info)


def show_settings(loaded: LoadedSettings, *, as_json: bool) -> None:
    """Print each setting with its value and its source."""
    names = list(ServeSettings.model_fields)
    if as_json:
        values = loaded.settings.model_dump(mode="json")
        shown = {
            name: {
                "value": loaded.shown(name) if isinstance(values[name], str) else values[name],
                "source": loaded.sources[name],
            }
            for name in names
        }
        print_json(shown)
        return
    places = {"file": f"file {loaded.config}", "env": f"env {ENV_PREFIX}"}
    rows = []
    for name in names:
        source = loaded.sources[name]
        rows.append((name, loaded.shown(name), places.get(source, source) + (name.upper() if source == "env" else "")))
    print_table("setting, value, source", rows)
