"""A service as a process of its own, shared by the tests of a session."""

from collections.abc import Iterator

import pytest

from tq_service.testing import ServiceProcess


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    with ServiceProcess() as service:
        yield service.address
