"""Help of the command line: there for each command, quick, and in line with what the commands say themselves."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tq_service.cli import _GROUPS, COMMANDS, app, main
from tq_service.testing import COMMAND

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_examples(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0, result.output
    module = importlib.import_module(f"tq_service.cli.{_GROUPS.get(name, name)}")
    summary = COMMANDS[name] if name in _GROUPS else (module.command.__doc__ or "").splitlines()[0]
    assert summary in " ".join(result.stdout.split())
    lines = examples(result.stdout)
    assert lines
    assert all(f"tq-service {name}" in line for line in lines)


def examples(shown: str) -> list[str]:
    """Return the lines that end a --help."""
    return shown.partition(" Examples:\n")[2].strip("\n").splitlines()


def verbs() -> Iterator[tuple[str, str]]:
    for name in _GROUPS:
        group: Any = typer.main.get_command(app).get_command(None, name)
        for verb in group.commands:
            yield name, verb


@pytest.mark.parametrize(("noun", "verb"), list(verbs()))
def test_each_verb_has_help_and_json_and_where_it_calls_the_service_an_address(noun: str, verb: str) -> None:
    shown = CliRunner().invoke(app, [noun, verb, "--help"]).stdout
    assert "  --json  " in shown
    assert ("-a, --address" in shown) is (noun != "token")
    assert f"tq-service {noun} {verb}" in "\n".join(examples(CliRunner().invoke(app, [noun, "--help"]).stdout))


def test_the_overview_names_every_command_without_importing_them() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from tq_service.cli import app, main;"
        "print(CliRunner().invoke(app, ['--help']).stdout);"
        "print(sorted({'grpc', 'torch', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"  {name}  " in output for name in COMMANDS)
    assert output.rstrip().endswith("[]")


def test_a_health_probe_imports_no_more_than_it_needs() -> None:
    code = "import sys, tq_service.cli.health; print(sorted({'torch', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_unknown_commands_and_flags_are_usage_errors() -> None:
    assert CliRunner().invoke(app, ["nonsense"]).exit_code == 2
    assert CliRunner().invoke(app, ["serve", "--nonsense"]).exit_code == 2
    assert CliRunner().invoke(app, ["serve", "--port", "x"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "exit_code", "error"),
    [
        (["nonsense"], 2, "error: No such command 'nonsense'"),
        (["status", "--nonsense"], 2, "error: No such option: --nonsense"),
        (["bench", "--ranks", "0"], 2, "error: Invalid value for '--ranks'"),
        (["serve", "--port", "99999"], 1, "error: --port: got 99999"),
        (["status", "-a", "http://localhost"], 1, "error: address: got 'http://localhost'"),
    ],
)
def test_errors_are_one_line_of_one_form_and_a_hint(arguments: list[str], exit_code: int, error: str) -> None:
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == exit_code
    lines = result.stderr.splitlines()
    assert lines[0].startswith(error)
    assert [line for line in lines[1:] if not line.startswith("hint: ")] == []


@pytest.mark.parametrize("name", ["partition", "task", "deadletter", "storage", "sampler", "checkpoint", "token"])
def test_the_help_of_a_group_has_whole_sentences(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"]).stdout
    listed = shown.partition("Commands:\n")[2].partition("\n\n")[0]
    assert "..." not in listed
    assert len(re.findall(r"[.]$", listed, re.MULTILINE)) >= len(re.findall(r"^  \w", listed, re.MULTILINE)) > 0


@pytest.mark.parametrize(("module", "extra"), [("uvicorn", "ui"), ("starlette.routing", "ui"), ("tensordict", "data")])
def test_a_missing_module_is_an_error_that_names_its_extra(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(**_options: Any) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("tq_service.cli.app", missing)
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, f"tq-service[{extra}]" in capsys.readouterr().err) == (1, True)


def test_the_version_is_told() -> None:
    result = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("tq-service")


@pytest.mark.parametrize("name", ["compose.yaml", "compose.secure.yaml", "compose.ha.yaml"])
def test_commands_of_the_compose_files_are_such_that_there_are(name: str) -> None:
    text = re.sub(r"\$\{\w+(?::?-(.*?)|:\?.*?)\}", r"\1", (ROOT / name).read_text())
    services = yaml.safe_load(text)["services"].values()
    commands = [each["command"] for each in services if each["image"].startswith("tq-service:") and "command" in each]
    assert ["bench", "--seconds", "10"] in commands
    group: Any = typer.main.get_command(app)
    for command in commands:
        context = group.make_context("tq-service", command)
        verb, taken, rest = group.resolve_command(context, command)
        taken.make_context(verb, rest, parent=context)  # raises where an argument is not known
