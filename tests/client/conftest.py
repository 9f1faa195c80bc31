"""A real service in the test's loop, and both clients on it."""

import pytest
from client_support import make_client

from tq_service.config import ServeSettings
from tq_service.server.app import running


@pytest.fixture
async def service():
    async with running(ServeSettings(host="127.0.0.1", port=0, max_bytes=64 << 20)) as app:
        yield f"127.0.0.1:{app.port}"


@pytest.fixture(params=["async", pytest.param("sync", marks=pytest.mark.nightly)])
def kind(request):
    """Each test runs with the async client; with the sync one, which is generated from it, in `make nightly`.

    Files about what the generator does not make, such as threads and connections, run with both in `make test`.
    """
    return request.param


@pytest.fixture
async def client(kind, service):
    client = make_client(kind, service, timeout=20)
    yield client
    await client.aclose()
