"""How a program in another environment answers a benchmark: a JSON object a line of stdin, one a line of stdout.

A request is `{"command": name, **arguments}`; the answer `{"result": ...}`, or `{"error": text}` when it raised.
`benchmarks.peer` is the other end. The standard library only: this runs where our package is not.
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
    """Enter `start`, answer with the commands that it gives until stdin ends, and leave it.

    What libraries print to stdout goes to stderr instead, so that it cannot be taken for an answer.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with start as commands:
        for line in sys.stdin:
            print(json.dumps(_answer(commands, json.loads(line))), file=answers, flush=True)


def _answer(commands: Commands, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": commands[request.pop("command")](**request)}
    except Exception:  # the benchmark raises it again and ends this program
        return {"error": traceback.format_exc()}
