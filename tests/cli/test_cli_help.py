"""Help of the command line: there for each command, quick, and in line with what the commands say themselves."""

import importlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tq_service.cli import _COMMANDS, app
from tq_service.testing import COMMAND


@pytest.mark.parametrize("name", _COMMANDS)
def test_each_command_has_help_with_examples(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0, result.output
    module = importlib.import_module(f"tq_service.cli.{name}")
    assert (module.command.__doc__ or "").splitlines()[0] in " ".join(result.stdout.split())
    for line in module.EXAMPLES.strip().splitlines():
        assert line in result.stdout
        assert f"tq-service {name}" in line


def test_the_overview_names_every_command_without_importing_them() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from tq_service.cli import app;"
        "print(CliRunner().invoke(app, ['--help']).stdout);"
        "print(sorted({'grpc', 'torch', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"  {name}  " in output for name in _COMMANDS)
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
        (["status", "http://localhost"], 1, "error: address: got 'http://localhost'"),
    ],
)
def test_errors_end_with_one_line_of_one_form(arguments: list[str], exit_code: int, error: str) -> None:
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == exit_code
    assert result.stderr.splitlines()[-1].startswith(error)


def test_the_version_is_told() -> None:
    result = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("tq-service")
