from unittest import mock

import pytest
from claims_driver import JudgedWaiter

from tq_service.serving import planner


@pytest.fixture(scope="module")
def judged_waiters():
    """Compare what waiting claims are told with the model when it is found, not when their callers go on."""
    with mock.patch.object(planner, "Waiter", JudgedWaiter):
        yield
