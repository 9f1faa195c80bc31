"""`tq-service ui` as a process of its own: a client of a service with TLS and tokens, in front of HTTP."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from certificates import Authority, add_token
from typer.testing import CliRunner

import tq_service as tq
from tq_service.cli import app
from tq_service.errors import InvalidArgumentError
from tq_service.testing import COMMAND, ListeningProcess, ServiceProcess

pytest.importorskip("uvicorn", reason="the extra `ui` is not installed")

ENV = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}


def frames(page: ListeningProcess, path: str = "/events") -> Any:
    with httpx.stream("GET", f"http://{page.address}{path}", timeout=20) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


def test_it_shows_what_its_token_may_see_and_neither_token_nor_paths(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    cert = authority.issue("controller")
    tokens = tmp_path / "tokens.toml"
    writer = add_token(tokens, "writer", ["produce"])
    (tmp_path / "reader.token").write_text(add_token(tokens, "reader", ["read"], ("train@",)))
    flags = ["--tls-cert", str(cert.cert), "--tls-key", str(cert.key), "--auth-tokens-file", str(tokens)]
    command = [*COMMAND, "ui", "--port", "0", "--root-path", "/tq", "--tls-ca", str(authority.ca)]
    command += ["--token-file", str(tmp_path / "reader.token")]
    with ServiceProcess(*flags) as service:
        with tq.Client(service.address, token=writer, tls=tq.Tls(ca=authority.ca)) as client:
            client.put("train@0", {"x": np.zeros(3)})
            client.put("secret", {"x": np.zeros(3)})
        with ListeningProcess([*command, "--address", service.address], env=ENV, log=tmp_path / "log") as page:
            text = next(frames(page, "/tq/events"))
            frame = json.loads(text)
            names = [each["summary"]["partition_id"] for each in frame["status"]["partitions"]]
            assert (frame["state"], names) == ("serving", ["train@0"])
            assert frame["status"]["service"]["tls"] and frame["status"]["service"]["auth"]
            assert (tmp_path / "reader.token").read_text() not in text
            assert str(tmp_path) not in text
        assert page.exit_code == 0
    assert page.read_log() == ""


def test_it_starts_before_the_service_and_ends_while_it_is_looked_at(tmp_path: Path) -> None:
    with ListeningProcess([*COMMAND, "ui", "--port", "0", "-a", "localhost:1"], env=ENV, log=tmp_path / "log") as page:
        shown = frames(page)
        frame = json.loads(next(shown))
        assert (frame["state"], frame["status"]) == ("away", None)
        assert frame["problem"] == "cannot reach localhost:1: connection refused"
        page.send_signal(signal.SIGINT)
        assert page.wait(10) == 0
        assert not [line for line in shown if not line]  # the stream ended, and was not cut
    assert page.read_log() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--address", "http://localhost"], "address: got 'http://localhost'"),
        (["--root-path", "tq"], "root_path is 'tq'"),
        (["--tls-ca", "/nowhere/ca.pem"], "/nowhere/ca.pem"),
        (["--host", "192.0.2.1", "--port", "0"], "cannot listen on 192.0.2.1:0"),
    ],
)
def test_what_cannot_work_ends_it_before_it_listens(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["ui", "-a", "localhost:1", *arguments])
    assert result.exit_code == 1
    assert isinstance(result.exception, InvalidArgumentError)
    assert message in str(result.exception)
    assert "listening" not in result.output
