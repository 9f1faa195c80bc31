"""Clients in forked processes, in programs of their own so that the tests' own threads play no part."""

import asyncio
import subprocess
import sys
import textwrap

import pytest

from tq_service.client._sync.calls import Calls
from tq_service.client.transport import _ABANDONED
from tq_service.wire.connection import Credentials

if sys.platform == "win32":
    pytest.skip("there is no fork", allow_module_level=True)

SYNC_PROGRAM = """
    import os, sys
    import tq_service as tq

    client = tq.Client(sys.argv[1], timeout=20)
    client.create_partition("parent")
    child = os.fork()
    if child == 0:
        client.create_partition("child")
        client.close()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    print([partition.partition_id for partition in client.list_partitions()])
    client.close()
"""

ASYNC_PROGRAM = """
    import asyncio, os, sys
    import tq_service as tq

    async def use(client):
        return await client.list_partitions()

    def in_child(client):
        for candidate in (client, tq.AsyncClient(sys.argv[1], timeout=20)):
            try:
                asyncio.run(use(candidate))
            except tq.errors.PreconditionError as error:
                assert error.reason == "FORKED_CLIENT"
                assert "spawn" in str(error)
            else:
                os._exit(1)
        with tq.Client(sys.argv[1], timeout=20) as sync:
            sync.create_partition("child")
        os._exit(0)

    client = tq.AsyncClient(sys.argv[1], timeout=20)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(use(client))
    child = os.fork()
    if child == 0:
        asyncio.set_event_loop(None)
        in_child(client)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    print([partition.partition_id for partition in loop.run_until_complete(use(client))])
    loop.run_until_complete(client.aclose())
"""


@pytest.mark.parametrize(
    ("program", "partitions"), [(SYNC_PROGRAM, ["child", "parent"]), (ASYNC_PROGRAM, ["child"])], ids=["sync", "async"]
)
async def test_clients_after_a_fork(service, program, partitions):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), service, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    assert output.decode().strip() == str(partitions)


def test_all_threads_of_a_forked_child_leave_the_channels_of_its_parent(monkeypatch):
    channels = Calls("127.0.0.1:1", Credentials())
    of_parent = channels.endpoint()
    monkeypatch.setattr("os.getpid", lambda: -1)
    of_child = channels.endpoint()
    assert of_child is not of_parent
    assert channels.endpoint() is of_child
    assert list(channels._channels) == [-1]
    assert [each for each in _ABANDONED if of_parent in each.values()]
