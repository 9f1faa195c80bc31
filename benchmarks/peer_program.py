"""Protocol of a program in another environment: it reads one JSON object per line of stdin, and answers on stdout.

A request is `{"command": name, **arguments}`; the answer `{"result": ...}`, or `{"error": text}` if it raised.
`benchmarks.peer` is the other end. It uses the standard library only, as our package is not installed there.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

Commands = Mapping[str, Callable[..., Any]]


def serve(start: AbstractContextManager[Commands]) -> None:
    """Enter `start`, answer requests with its commands until stdin ends, and leave it.

    Output of libraries to stdout is sent to stderr, so it cannot be mistaken for an answer.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with start as commands:
        for line in sys.stdin:
            print(json.dumps(_answer(commands, json.loads(line))), file=answers, flush=True)


def _answer(commands: Commands, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": commands[request.pop("command")](**request)}
    except Exception:  # the benchmark raises it and ends this program
        return {"error": traceback.format_exc()}
