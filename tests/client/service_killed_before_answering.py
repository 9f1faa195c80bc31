"""The service, which is killed once as soon as a gathered put, or a range of batches, is durable and not answered.

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
real_meta, real_answer, real_wait = converters.written_meta, converters.claim_answer, StateStore.wait_durable
counts = []


def written_meta(written):
    counts.append(len(written.global_indexes))
    return real_meta(written)


def claim_answer(*args, **kwargs):
    answer = real_answer(*args, **kwargs)
    counts.append(1 + len(answer.more))
    return answer


async def wait_durable(store):
    await real_wait(store)
    kill_once()


def kill_once():
    if max(counts, default=0) > 1 and marker.exists():
        marker.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    converters.written_meta, converters.claim_answer = written_meta, claim_answer
    StateStore.wait_durable = wait_durable
    main()
