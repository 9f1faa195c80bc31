"""`tq-service serve`: runs the service until SIGTERM or SIGINT. Every setting has a flag."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from tq_service.cli.log_lines import configure_logging
from tq_service.cli.options import Answer, announce, option, show, table, with_options
from tq_service.config import (
    CONFIG_VARIABLE,
    ENV_PREFIX,
    LoadedSettings,
    ServeSettings,
    format_setting,
    load_settings,
    unknown_variables,
)
from tq_service.log_message import LogMessage

EXAMPLES = """\
  tq-service serve
  tq-service serve --port 6000 --max-bytes 8GiB
  tq-service serve --host 0.0.0.0 --tls-cert tq.pem --tls-key tq.key --auth-tokens-file tokens.toml
  tq-service serve --role storage --port 50052 --controller localhost:50051
  TQ_PORT=6000 tq-service serve --config tq.toml --show-config"""

_log = logging.getLogger(__name__)


def _command(
    config: Annotated[Path | None, typer.Option(envvar=CONFIG_VARIABLE, help="TOML file with settings.")] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print every setting with its source, then exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --show-config, print JSON.")] = False,
    stop_with_stdin: Annotated[
        bool,
        typer.Option(
            "--stop-with-stdin",
            help="Stop when stdin is closed, for example because the parent process has exited.",
        ),
    ] = False,
    **flags: object,
) -> None:
    """Run the service until SIGTERM or SIGINT, then let running calls finish.

    Each setting is read from its flag, the environment variable TQ_<SETTING>, or the --config file, in that order.
    """
    loaded = load_settings(flags, config)
    if show_config:
        show(_settings(loaded), as_json)
        return
    if stop_with_stdin:
        threading.Thread(target=_stop_with_stdin, daemon=True).start()
    raise typer.Exit(_run(loaded.settings))


def _run(settings: ServeSettings) -> int:
    configure_logging(settings.log_level, settings.log_format, settings.audit_file)
    if unknown := unknown_variables():
        named = [f"{name} (did you mean {near}?)" if near else name for name, near in unknown.items()]
        _log.warning(LogMessage("ignored environment variables that match no setting", variables=", ".join(named)))
    from tq_service.server.app import serve  # noqa: PLC0415  (not needed by --show-config and --help)
    from tq_service.server.process import loop_factory  # noqa: PLC0415  (as above)
    from tq_service.server.supervisor import FAILED_EXIT_CODE  # noqa: PLC0415  (as above)

    with asyncio.Runner(loop_factory=loop_factory(settings.uvloop)) as runner:
        code = runner.run(serve(settings, announce=announce))
        if code == FAILED_EXIT_CODE:
            logging.shutdown()
            sys.stdout.flush()
            os._exit(code)  # exit without waiting for threads, which may be blocked after a failure
        return code


def _stop_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):  # sys.stdin.read would hold a lock that prevents the process from exiting
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _settings(loaded: LoadedSettings) -> Answer:
    """Yield the settings with their values and sources, first as a JSON document and then as a table."""
    values = loaded.settings.model_dump(mode="json")
    yield {
        name: {"value": loaded.shown(name) if isinstance(value, str) else value, "source": loaded.sources[name]}
        for name, value in values.items()
    }
    rows = []
    for name in values:
        source = loaded.sources[name]
        places = {"file": f"file {loaded.config}", "env": f"env {ENV_PREFIX}{name.upper()}"}
        rows.append((name, loaded.shown(name), places.get(source, source)))
    yield table("setting, value, source", rows)


def _flag(name: str) -> inspect.Parameter:
    field = ServeSettings.model_fields[name]
    kind: Any = field.annotation
    metavar: str | None = None
    if get_args(kind) and all(isinstance(choice, str) for choice in get_args(kind)):
        metavar = "|".join(get_args(kind))
    if name.endswith("_bytes"):
        metavar = "SIZE"
    # `ServeSettings` validates the values, so most options are strings. Numbers and flags keep their types for --help.
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


command = with_options(_command, map(_flag, ServeSettings.model_fields))
