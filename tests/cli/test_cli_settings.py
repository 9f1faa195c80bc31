"""Settings: flag over environment over file over default, and messages that name the place to correct."""

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import tq_service
from tq_service.cli import app
from tq_service.config import (
    CLIENT_VARIABLES,
    ServeSettings,
    default_max_bytes,
    format_size,
    is_loopback,
    join_address,
    load_settings,
    parse_size,
    unknown_variables,
)
from tq_service.errors import InvalidArgumentError
from tq_service.memory_limit import memory_limit_bytes


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tq.toml"
    path.write_text('port = 1001\nmax_bytes = "1GiB"\nlog_level = "error"\n')
    return path


def test_flag_goes_over_env_over_file_over_default(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = load_settings({})
    assert defaults.settings.port == 50051
    assert set(defaults.sources.values()) == {"default"}

    from_file = load_settings({}, config)
    assert (from_file.settings.port, from_file.sources["port"]) == (1001, "file")

    monkeypatch.setenv("TQ_PORT", "1002")
    from_env = load_settings({}, config)
    assert (from_env.settings.port, from_env.sources["port"]) == (1002, "env")
    assert (from_env.settings.max_bytes, from_env.sources["max_bytes"]) == (2**30, "file")

    from_flag = load_settings({"port": 1003, "host": None}, config)
    assert (from_flag.settings.port, from_flag.sources["port"]) == (1003, "flag")
    assert (from_flag.settings.host, from_flag.sources["host"]) == ("127.0.0.1", "default")
    assert from_flag.settings.log_level == "error"


def test_the_environment_names_the_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_CONFIG", str(config))
    loaded = load_settings({})
    assert (loaded.settings.port, loaded.config) == (1001, config)


def test_empty_variables_count_as_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_MAX_BYTES", "")
    assert load_settings({}).sources["max_bytes"] == "default"


def test_unknown_settings_in_a_file_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "tq.toml"
    path.write_text("max_byte = 5\n")
    with pytest.raises(
        InvalidArgumentError, match=r"max_byte; did you mean max_bytes\? known settings: .*host.*uvloop"
    ):
        load_settings({}, path)


@pytest.mark.parametrize(("text", "message"), [("port = [", "is not valid TOML"), (None, "cannot be read")])
def test_unreadable_files_are_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "tq.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        load_settings({}, path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": 70000}, r"--port: got 70000"),
        ({"max_bytes": "8 foo"}, r"--max-bytes: got '8 foo': expected a size in bytes, such as 8GiB"),
        ({"max_bytes": "0"}, r"--max-bytes: got 0"),
        ({"role": "both"}, r"--role: got 'both'.*'controller', 'storage' or 'all'"),
        ({"role": "storage"}, r"role is storage, but controller is not set"),
        ({"controller": "a:1"}, r"controller is set, but role is all"),
        ({"port": -1, "grace_seconds": -2}, r"--port: .*; --grace-seconds: "),
    ],
)
def test_wrong_values_are_refused_with_their_place(flags: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        load_settings(flags)


def test_wrong_values_of_environment_and_file_name_their_place(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_PORT", "tcp://10.0.0.1:50051")
    config.write_text("sampler_threads = 0\n")
    with pytest.raises(InvalidArgumentError) as caught:
        load_settings({}, config)
    assert f"sampler_threads in {config}: got 0" in str(caught.value)
    assert "TQ_PORT: got 'tcp://10.0.0.1:50051'" in str(caught.value)
    assert "enableServiceLinks" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("8GiB", 8 * 2**30), ("500MB", 500_000_000), ("1.5 GiB", 3 * 2**29), ("7", 7), ("2k", 2000), ("64mib", 2**26),
     ("5 B", 5), ("1T", 10**12), ("0.5KiB", 512)],
)  # fmt: skip
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "8 foo", "8bit", "8GiB please", "1.", ".5", "-1", "1e9", "8Ki", "9" * 400 + "T"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size in bytes, such as 8GiB, 500MB or 1048576"):
        parse_size(text)


def test_no_limit() -> None:
    assert parse_size("none") is None
    assert format_size(None) == "none"
    assert load_settings({"max_bytes": "none"}).settings.max_bytes is None


@given(st.integers(min_value=0, max_value=2**50))
def test_sizes_are_shown_as_they_are_read(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


def test_the_default_quota_is_half_of_the_memory() -> None:
    assert memory_limit_bytes() // 2 - 2**20 < default_max_bytes() <= memory_limit_bytes() // 2
    assert ServeSettings().max_bytes == default_max_bytes()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True), ("0.0.0.0", False), ("tq", False)],
)
def test_clients_may_name_classes_only_where_no_other_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    assert load_settings({"host": host, "insecure": True}).settings.allow_sampler_import is expected
    assert load_settings({"host": host, "insecure": True, "allow_sampler_import": True}).settings.allow_sampler_import
    assert not load_settings({"host": host, "insecure": True, "auth_tokens_file": "t"}).settings.allow_sampler_import


def test_a_port_beyond_this_machine_takes_tls_and_tokens_or_insecure() -> None:
    pair = {"tls_cert": "c", "tls_key": "k"}
    assert load_settings({"host": "0.0.0.0", "auth_tokens_file": "t", **pair}).settings.is_secured
    assert not load_settings({"host": "0.0.0.0", "insecure": True}).settings.is_secured
    for partly, lacking in (
        ({}, "tls_cert and no auth_tokens_file"),
        (pair, "no auth_tokens_file"),
        ({"auth_tokens_file": "t"}, "no tls_cert"),
    ):
        for host in ("0.0.0.0", "::", "tq", "10.0.0.1"):
            with pytest.raises(InvalidArgumentError, match=f"{lacking}.*set insecure"):
                load_settings({"host": host, **partly})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"tls_cert": "c"}, "one of tls_cert and tls_key"),
        ({"tls_key": "k"}, "one of tls_cert and tls_key"),
        ({"tls_client_ca": "a"}, "requires tls_cert and tls_key"),
    ],
)
def test_tls_settings_go_together(given: dict[str, str], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        load_settings(given)


def test_addresses_of_a_storage_service() -> None:
    def storage(**given: object) -> ServeSettings:
        return load_settings({"role": "storage", "controller": "c:1", "insecure": True, **given}).settings

    assert storage().advertised_address(7) == "127.0.0.1:7"
    assert storage(host="::1").advertised_address(7) == "[::1]:7"
    assert storage(advertise="storage-0.tq:9").advertised_address(7) == "storage-0.tq:9"
    assert storage(host="0.0.0.0").advertised_address(7).endswith(":7")
    assert not storage(host="0.0.0.0").advertised_address(7).startswith("0.0.0.0")
    assert load_settings({}).settings.advertised_address(7) == ""
    assert storage(storage_id="s").storage_name(7) == "s"
    assert storage().storage_name(7) != storage().storage_name(8)
    assert join_address("tq", 5) == "tq:5"


def test_show_config_tells_value_and_source(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_LOG_FORMAT", "json")
    arguments = ["serve", "--show-config", "--config", str(config), "--host", "::1", "--no-reflection"]
    table = CliRunner().invoke(app, arguments)
    assert table.exit_code == 0
    lines = {line.split()[0]: line.split()[1:] for line in table.stdout.splitlines()[1:]}
    assert set(lines) == set(ServeSettings.model_fields)
    assert lines["host"] == ["::1", "flag"]
    assert lines["reflection"] == ["false", "flag"]
    assert lines["log_format"] == ["json", "env", "TQ_LOG_FORMAT"]
    assert lines["max_bytes"][:2] == ["1GiB", "file"]
    assert lines["grace_seconds"] == ["15.0", "default"]

    shown = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert set(shown) == set(ServeSettings.model_fields)
    assert shown["max_bytes"] == {"value": 2**30, "source": "file"}


def test_every_setting_has_a_flag_with_its_description() -> None:
    shown = "".join(CliRunner().invoke(app, ["serve", "--help"]).stdout.split())  # lines break at hyphens, too
    for name, field in ServeSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert field.description
        assert field.description.replace(" ", "") in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"durability": "process"}, "but data_dir is not set"),
        ({"durability": "disk"}, "but data_dir is not set"),
        ({"durability": "memory", "data_dir": "/srv/tq"}, "but data_dir is set"),
        ({"durability": "always"}, "--durability"),
    ],
)
def test_durability_and_its_directory_go_together(flags, message):
    with pytest.raises(InvalidArgumentError, match=message):
        load_settings(flags)


def test_a_directory_alone_asks_for_durability():
    settings = load_settings({"data_dir": "/srv/tq"}).settings
    assert (settings.durability, str(settings.data_dir)) == ("auto", "/srv/tq")


def test_the_page_of_limits_has_all_of_them_as_they_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]+) \|", page, re.MULTILINE)
    told = {}
    for names, defaults in rows:
        told |= dict(zip(re.findall(r"\w+", names), defaults.split(", "), strict=True))
    defaults = {name: field.default for name, field in ServeSettings.model_fields.items()}
    assert [name for name in defaults if name.startswith("max_") and name not in told] == [
        "max_bytes"
    ]  # above the table
    shown = {name: format_size(defaults[name]) if name.endswith("_bytes") else f"{defaults[name]:.0f}" for name in told}
    assert told == shown


def test_help_groups_the_settings() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"]).stdout
    groups = re.split(r"^(\w[^:\n]*):\n", shown, flags=re.MULTILINE)
    told = dict(zip(groups[1::2], groups[2::2], strict=True))
    for name in ServeSettings.model_fields:
        assert f"  --{name.replace('_', '-')} " in told[ServeSettings.section_of(name)]
    assert next(iter(told)) == "Options"
    assert {"--config", "--show-config", "--help"} <= set(re.findall(r"--[\w-]+", told["Options"]))


def test_help_shows_defaults_the_way_they_are_given() -> None:
    shown = " ".join(CliRunner().invoke(app, ["serve", "--help"]).stdout.split())
    for default in ("[default: 4MiB]", "[default: false]", "[default: 127.0.0.1]"):
        assert default in shown
    assert "[default: None]" not in shown


def test_variables_that_nothing_reads_are_named_with_the_nearest_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TQ_")]:
        monkeypatch.delenv(name)
    links = {
        "TQ_SERVICE_SERVICE_HOST": "10.0.0.1",
        "TQ_SERVICE_SERVICE_PORT_GRPC": "50051",
        "TQ_SERVICE_PORT": "tcp://10.0.0.1:50051",
        "TQ_SERVICE_PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    for name, value in {
        **links,
        "TQ_MAX_BYTES": "1GiB",
        "TQ_CONFIG": "tq.toml",
        "TQ_ADDRESS": "c1",
        "TQ_MAX_BYTE": "1GiB",
        "TQ_METRIC_PORT": "9464",
        "TQ_COLOR": "red",
        "TQX": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert unknown_variables() == {
        "TQ_COLOR": None,
        "TQ_MAX_BYTE": "TQ_MAX_BYTES",
        "TQ_METRIC_PORT": "TQ_METRICS_PORT",
    }


def test_variables_of_clients_are_those_that_the_package_reads() -> None:
    settings = {f"TQ_{name.upper()}" for name in ServeSettings.model_fields}
    package = Path(tq_service.__file__).parent
    texts = (path.read_text() for path in package.rglob("*.py") if path.name != "config.py")
    read = {name for text in texts for name in re.findall(r"[\"'](TQ_[A-Z_]+)[\"']", text)}
    tls = {f"TQ_TLS_{name}" for name in ("CA", "CERT", "KEY")}
    assert CLIENT_VARIABLES - tls <= read
    assert read <= settings | CLIENT_VARIABLES | {"TQ_CONFIG"}


STORAGE = ("--role", "storage", "--controller", "localhost:1")


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_settings_are_shown_without_passwords(form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_MIRROR", "valkey://me:geheim@store:6379/tq?secret=geheim")
    shown = CliRunner().invoke(app, ["serve", "--show-config", *form, *STORAGE])
    assert shown.exit_code == 0
    assert "valkey://store:6379/tq" in shown.stdout
    assert "geheim" not in shown.stdout


@pytest.mark.parametrize(
    "given",
    [
        ("--journal", "etcd://me:geheim@one:2379"),
        ("--journal", "http://me:geheim@one:2379"),
        ("--controller", "http://me:geheim@one:2379"),
        ("--mirror", "valkey://me:geheim@store"),
    ],
)
def test_errors_of_settings_show_no_passwords(given: tuple[str, ...]) -> None:
    refused = CliRunner().invoke(app, ["serve", *given])
    assert isinstance(refused.exception, InvalidArgumentError)
    assert "geheim" not in str(refused.exception)
