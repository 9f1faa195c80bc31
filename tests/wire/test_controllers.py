"""Which controller of a cluster is asked next."""

from __future__ import annotations

import pytest

from tq_service.errors import InvalidArgumentError, NotLeaderError, UnavailableError
from tq_service.wire.connection import Controllers


def not_leader(address: str) -> NotLeaderError:
    return NotLeaderError("it stands by", metadata={"leader_address": address})


def test_those_given_have_their_turns_while_none_answers() -> None:
    controllers = Controllers("a:1,b:1,c:1")
    asked = []
    for _ in range(5):
        asked.append(controllers.current)
        controllers.note(controllers.current, UnavailableError("cannot reach it: connection refused"))
    assert asked == ["a:1", "b:1", "c:1", "a:1", "b:1"]


def test_a_standby_says_where_the_leader_is_whether_that_was_given_or_not() -> None:
    controllers = Controllers("dns-name:1")
    assert not controllers.has_several
    controllers.note("dns-name:1", not_leader("b:1"))
    assert controllers.current == "b:1"
    assert controllers.has_several
    controllers.note("b:1", UnavailableError("cannot reach b:1: connection refused"))
    assert controllers.current == "dns-name:1"


def test_a_standby_that_knows_no_leader_has_the_next_one_asked() -> None:
    controllers = Controllers("a:1,b:1")
    controllers.note("a:1", not_leader(""))
    assert controllers.current == "b:1"
    controllers.note("b:1", not_leader("b:1"))  # of itself, while it has no lease
    assert controllers.current == "a:1"


def test_one_that_is_paused_is_not_asked_again_because_a_standby_still_names_it() -> None:
    controllers = Controllers("a:1,b:1,c:1")
    controllers.note("a:1", UnavailableError("cannot reach a:1: timed out"))
    assert controllers.current == "b:1"
    controllers.note("b:1", not_leader("a:1"))
    assert controllers.current == "c:1"
    controllers.note("c:1", not_leader(""))
    assert controllers.current == "b:1"  # and not in its turn
    controllers.note("b:1", not_leader("c:1"))
    assert controllers.current == "c:1"
    for address in ("c:1", "b:1"):
        controllers.current = address
        controllers.note(address, UnavailableError("timed out"))
    assert controllers.current == "c:1"  # where all are silent they have their turns


@pytest.mark.parametrize("error", [UnavailableError("late"), InvalidArgumentError("of the call")])
def test_a_call_to_another_one_and_an_error_of_the_call_change_nothing(error: UnavailableError) -> None:
    controllers = Controllers("a:1,b:1")
    controllers.note("b:1", error)
    controllers.note("a:1", InvalidArgumentError("of the call"))
    assert controllers.current == "a:1"
