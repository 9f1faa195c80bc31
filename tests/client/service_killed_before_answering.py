"""The service, which is killed once as soon as a gathered put is durable, before it is answered.

Run with the path of a file, which it removes when it does so, before the arguments of the command line.
"""

import os
import signal
import sys
from pathlib import Path

from tq_service.cli import main
from tq_service.durable.state_store import StateStore
from tq_service.server import converters

marker = Path(sys.argv.pop(1))
real_meta, real_wait = converters.written_meta, StateStore.wait_durable
row_counts = []


def written_meta(written):
    row_counts.append(len(written.global_indexes))
    return real_meta(written)


async def wait_durable(store):
    await real_wait(store)
    kill_once()


def kill_once():
    if max(row_counts, default=0) > 1 and marker.exists():
        marker.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    converters.written_meta, StateStore.wait_durable = written_meta, wait_durable
    main()
