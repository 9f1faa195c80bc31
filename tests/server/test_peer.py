"""The channel of a service to another one follows its certificates, also while they are being replaced."""

from pathlib import Path

import grpc
import pytest
from certificates import Authority

from tq_service.server.peer import Peer
from tq_service.wire.connection import Credentials


async def test_files_that_are_away_for_a_moment_do_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    tls = authority.issue("service")
    channels: list[grpc.aio.Channel] = []

    def make_stub(channel: grpc.aio.Channel) -> int:
        channels.append(channel)
        return len(channels)

    peer = Peer("localhost:1", Credentials(None, tls, None), make_stub)
    peer.follow_files()
    assert peer.stub == 1
    content = authority.ca.read_bytes()
    authority.ca.unlink()
    peer.follow_files()
    assert peer.stub == 1
    assert "could not use the new certificates" in caplog.text
    channels[0].get_state()  # it is open
    authority.ca.write_bytes(content)
    peer.follow_files()
    assert peer.stub == 2
    peer.follow_files()
    assert peer.stub == 2
    await peer.aclose()
