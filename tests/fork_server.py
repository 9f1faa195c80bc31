"""Python programs of the tests, forked from a process that has already imported what they import.

Most of the processor time of a short program goes into imports: about 1 s for a service and 5 s for a program with
torch and tensordict, and `make test` starts hundreds. A fork server imports once for each process of pytest:

    test: subprocess.Popen --> ForkedPopen -- command, environment, 3 file descriptors --> fork server --fork--> program
                                   <-- pid, exit status --

The program is a process like any other: it has a pid, can be killed and stopped, and runs the command as `python -m`,
`python FILE` or `python -c` would. It differs in two ways: modules are imported when it starts, and it is not a child
of the tests, so `os.waitid` does not know it. `install` replaces `subprocess.Popen`. Commands that `_server_of` does
not recognize start as usual: interpreters with flags, tests of imports, and everything that other programs start, such
as the services of examples and of the demo's ranks.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import json
import multiprocessing
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_REQUEST_BYTES = 1 << 20
_SERVICE = ("tq_service.cli", "tq_service.cli.serve", "tq_service.server.app", "tq_service.client")
_TORCH = ("tensordict", "tq_service", "tq_service.data", "torch.distributed")
_DIRECTORIES = {ROOT / "examples": "torch", ROOT / "tests" / "data": "torch", ROOT / "tests" / "client": "service"}
# Programs whose imports are what is tested.
_FRESH = {"quiet_program.py"}
_IMPORTS_TORCH = re.compile(r"^\s*(import|from) torch\b", re.MULTILINE)
_Popen = subprocess.Popen


class ForkServer:
    """The side of the tests: starts the server with the first program, and ends it with this process."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._owner = 0
        atexit.register(self._stop)

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Return the pid of a program that runs the request, with these descriptors as stdin, stdout and stderr."""
        return self._ask(request, descriptors)

    def reap(self, pid: int) -> int:
        """Return the status of a program that has ended, as `os.waitpid` does."""
        return self._ask({"reap": pid}, ())

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        with self._lock:
            if self._socket is None or self._owner != os.getpid():
                self._start()
            assert self._socket is not None
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError(f"the fork server for {', '.join(self._modules)} has ended; stderr says why")
        return int(answer)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
        with theirs:
            process = _Popen([sys.executable, __file__, *self._modules], stdin=theirs, cwd=ROOT)
        self._process, self._socket, self._owner = process, ours, os.getpid()

    def _stop(self) -> None:
        if self._socket is not None and self._process is not None and self._owner == os.getpid():
            self._socket.close()
            self._process.terminate()
            self._process.wait()


_SERVERS = {"service": ForkServer(_SERVICE), "torch": ForkServer(_TORCH)}


def _server_of(args: Any, env: Any) -> ForkServer | None:
    """Return the server that forks a command, or None if the command has to start by itself."""
    if not isinstance(args, (list, tuple)) or len(args) < 2 or args[0] != sys.executable:
        return None
    if env is not None and _interpreter_variables(env) != _interpreter_variables(os.environ):
        return None
    args = [*map(os.fspath, args)]
    if tuple(args[1:3]) == ("-m", "tq_service.cli"):
        return _SERVERS["service"]
    if args[1] == "-c":
        is_forked = _IMPORTS_TORCH.search(args[2]) and "sys.modules" not in args[2]
        return _SERVERS["torch"] if is_forked else None
    path = Path(args[1])
    return None if path.name in _FRESH else _SERVERS.get(_DIRECTORIES.get(path.parent, ""))


def _interpreter_variables(env: Any) -> dict[str, str]:
    """Return variables that only a new interpreter can follow. A program sets its own path."""
    return {name: value for name, value in env.items() if name.startswith(("PYTHON", "LD_")) and name != "PYTHONPATH"}


class ForkedPopen(_Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` whose commands are forked where a server for them exists."""

    _server: ForkServer | None = None

    def _execute_child(  # noqa: PLR0917  (as it is called)
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        startupinfo, _flags, shell, *pipes = rest[:9]
        restore_signals, gid, gids, uid, umask, start_new_session, process_group = rest[9:]
        others = (executable, preexec_fn, startupinfo, gid, gids, uid)
        plain = not any(others) and not pass_fds and not shell and umask == process_group == -1
        self._server = _server_of(args, env) if plain and restore_signals else None
        if self._server is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)  # type: ignore[misc]
            return
        stdin, _, _, stdout, _, stderr = pipes
        request = {
            "args": list(map(str, args[1:])),
            "cwd": os.path.abspath(cwd or "."),  # noqa: PTH100  (of strings and bytes)
            "env": dict(os.environ if env is None else env),
            "start_new_session": start_new_session,
        }
        given = [number if pipe == -1 else pipe for number, pipe in enumerate((stdin, stdout, stderr))]
        try:
            self.pid = self._server.fork(request, given)
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True
        self._ended = os.pidfd_open(self.pid)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._server is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        if not poll.poll(0 if wait_flags & os.WNOHANG else None):
            return 0, 0
        status = self._server.reap(self.pid)
        os.close(self._ended)
        return self.pid, status

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._server is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc, no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def install() -> None:
    """Fork the programs of `subprocess.Popen` if the system has pidfds, and preload the forkservers of processes."""
    multiprocessing.set_forkserver_preload([*_TORCH])
    if hasattr(os, "pidfd_open"):
        subprocess.Popen = ForkedPopen  # type: ignore[misc]


def main() -> None:
    """Import modules, and then fork a program for each request, until the socket on stdin is closed."""
    del sys.path[0]  # this directory
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; programs get theirs, and the tests end this process
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as requests:
        os.close(0)
        while True:
            text, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
            if not text:
                return
            request = json.loads(text)
            if "reap" in request:
                requests.send(str(os.waitpid(request["reap"], 0)[1]).encode())
                continue
            pid = os.fork()
            if not pid:
                break
            requests.send(str(pid).encode())
            for descriptor in descriptors:
                os.close(descriptor)
    _become(request, descriptors)


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Run a program in this process, which was just forked."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["start_new_session"]:
        os.setsid()
    # The numbers that came may be among the first three, since 0 is closed.
    moved = [os.dup2(descriptor, 100 + number) for number, descriptor in enumerate(descriptors)]
    for descriptor in descriptors:
        os.close(descriptor)
    for number, descriptor in enumerate(moved):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    own_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8")  # noqa: SIM115  (as the interpreter does)
    for name, number, is_direct in (("stdout", 1, False), ("stderr", 2, True)):
        binary = io.BufferedWriter(io.FileIO(number, "w"))
        errors = "backslashreplace" if is_direct else "strict"
        stream = io.TextIOWrapper(binary, "utf-8", errors, line_buffering=is_direct or os.isatty(number))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    args = request["args"]
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    kept = [entry for entry in sys.path if entry not in own_path]
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    program.__dict__["__builtins__"] = __builtins__
    if args[0] == "-m":
        sys.path[:] = [request["cwd"], *added, *kept]
        sys.argv[:] = args[1:]
        runpy._run_module_as_main(args[1])  # type: ignore[attr-defined]  # what `python -m` calls
        return
    if args[0] == "-c":
        directory, name, text = "", "<string>", args[1]
        sys.argv[:] = ["-c", *args[2:]]
    else:
        directory, name, text = str(Path(args[0]).parent), args[0], Path(args[0]).read_text(encoding="utf-8")
        sys.argv[:] = args
        program.__file__ = name
    sys.path[:] = [directory, *added, *kept]
    exec(compile(text, name, "exec"), program.__dict__)


if __name__ == "__main__":
    main()
