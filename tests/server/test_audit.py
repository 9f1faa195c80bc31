"""The audit log: what a line says, and how a flood of refusals is told."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq_service.server.audit import LOGGER_NAME, Audit, AuditLine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def refusal(token: str = "a", peer: str = "ipv4:10.0.0.1:5", partition: str = "p") -> AuditLine:
    return AuditLine(
        decision="refused", method="/s/M", peer=peer, token=token, partition=partition, reason="outside its prefixes"
    )


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, LOGGER_NAME)
    return caplog


def told(log: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    return [(vars(record)["audit"].partition, vars(record)["audit"].repeats) for record in log.records]


@given(st.text(), st.text())
def test_a_line_is_one_line_of_plain_characters(partition: str, reason: str) -> None:
    text = str(AuditLine(decision="refused", method="/s/M", partition=partition, reason=reason))
    assert text.isascii()
    assert text.isprintable()
    assert text.startswith('refused method="/s/M"')


def test_what_is_not_known_is_left_out() -> None:
    assert str(AuditLine(decision="allowed", method="/s/M")) == 'allowed method="/s/M"'


def test_each_refusal_has_its_line_unless_told_otherwise(log: pytest.LogCaptureFixture) -> None:
    audit = Audit()
    for _ in range(100):
        audit.note(refusal())
    assert told(log) == [("p", 0)] * 100


def test_refusals_of_one_kind_are_counted(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    audit = Audit(10.0, clock)
    for number in range(50):
        audit.note(refusal(peer=f"ipv4:10.0.0.1:{number}", partition=f"p{number}"))
    assert told(log) == [("p0", 0)]
    audit.note(refusal(token="b"))
    audit.note(refusal(peer="ipv4:10.0.0.2:5"))
    assert len(log.records) == 3
    audit.note(AuditLine(decision="allowed", method="/s/M"))
    audit.note(AuditLine(decision="allowed", method="/s/M"))
    assert len(log.records) == 5
    clock.now += 10.0
    audit.flush()
    assert told(log)[5:] == [("p49", 49)]
    assert vars(log.records[5])["audit"].peer == "ipv4:10.0.0.1"
    audit.note(refusal(partition="again"))
    assert told(log)[6:] == [("again", 0)]


def test_what_was_counted_is_told_at_the_end(log: pytest.LogCaptureFixture) -> None:
    audit = Audit(10.0, Clock())
    audit.note(refusal())
    audit.note(refusal())
    audit.flush()
    assert told(log) == [("p", 0)]
    audit.flush(everything=True)
    assert told(log) == [("p", 0), ("p", 1)]
    audit.flush(everything=True)
    assert len(log.records) == 2
