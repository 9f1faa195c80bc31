"""A stand-in for a CUDA device, on the CPU: streams that work when somebody waits for it, and pinning that is counted.

A stream is a list of work that is not done before it must be: a copy that does not wait for its event copies what the
memory holds too early, and memory that is reused too early is seen with other bytes. Time passes by `query`, which does
one piece of work, and by waiting.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tq_service.client import landing, reads, transport
from tq_service.data import columns as data_columns
from tq_service.data import on_device
from tq_service.errors import InvalidArgumentError
from tq_service.wire import columns, cuda, device, encoding, host_memory

MODULES = (columns, encoding, landing, on_device, reads)  # those that ask whether a tensor is on a device
FUNCTIONS = (
    "find", "current_stream", "side_streams", "new_stream", "using", "record", "empty", "copy", "used_by", "register",
    "unregister",
)  # fmt: skip
GARBAGE = 0xAB
CONCATENATE = torch.cat
COPIED = data_columns._copied


class OnDevice(torch.Tensor):
    """A tensor that is on the device; whatever is computed from it is, too.

    What reads its values is done by the current stream, after all that this was given before.
    """

    owner: StandIn | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        takes_rows = function is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor)
        if cls.owner is not None and (takes_rows or function in {torch.Tensor.clone, torch.Tensor.repeat_interleave}):
            cls.owner.catch_up()
        return super().__torch_function__(function, types, args, kwargs)


class StandInStream:
    """Work that is done in order, once it is waited for."""

    def __init__(self, owner: StandIn, name: str) -> None:
        self._owner = owner
        self.name = name
        self._waiting: list[Callable[[], object]] = []
        self.given_count = self.done_count = 0

    def give(self, work: Callable[[], object]) -> None:
        with self._owner.lock:
            self._waiting.append(work)
            self.given_count += 1
            if self._owner.is_eager:
                self.run()

    def wait_event(self, event: StandInEvent) -> None:
        self._owner.note("wait", self.name)
        self.give(event.reach)

    def run(self, until: int | None = None) -> None:
        with self._owner.lock:
            until = self.given_count if until is None else until
            while self.done_count < until:
                self.done_count += 1
                self._waiting.pop(0)()


class StandInEvent:
    """How much a stream was given when it was recorded."""

    def __init__(self, owner: StandIn, stream: StandInStream) -> None:
        self._owner, self._stream, self._until = owner, stream, stream.given_count

    def query(self) -> bool:
        with self._owner.lock:
            if self._stream.done_count < self._until:
                self._stream.run(self._stream.done_count + 1)
            return self._stream.done_count >= self._until

    def reach(self) -> None:
        self._stream.run(self._until)

    def synchronize(self) -> None:
        self._owner.note("synchronize", self._stream.name)
        self.reach()


class StandIn:
    """The functions of `wire.cuda`, and what happened on them.

    Attributes:
        log: what was done in order: "synchronize" (by a thread), "used", "down" and "up", each with its stream.
        pinned: the size of what is pinned, by its address.
        most_pinned_bytes: the most that was pinned at once.
        refuses: whether it refuses to pin.
        is_eager: whether streams work at once.
        free_bytes: what is left on the device; None: any number.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.log: list[tuple[str, str]] = []
        self.pinned: dict[int, int] = {}
        self.most_pinned_bytes = self.pin_count = 0
        self.refuses = self.is_eager = False
        self.free_bytes: int | None = None
        self.default = StandInStream(self, "default")
        self._current = threading.local()
        self.under_way: list[tuple[int, int]] = []  # addresses and sizes of the host that copies use
        self._storages: set[int] = set()
        self._made = 0

    def note(self, what: str, where: str) -> None:
        with self.lock:
            self.log.append((what, where))

    def find(self, name: Any) -> torch.device:
        if str(name) not in ("cuda", "cuda:0"):
            raise InvalidArgumentError(f"device is {name!r}; expected 'cuda:0'", field="device")
        return torch.device("cuda", 0)

    def current_stream(self, _device: torch.device) -> StandInStream:
        stack = getattr(self._current, "streams", None)
        return stack[-1] if stack else self.default

    def side_streams(self) -> list[StandInStream]:
        stream = self.current_stream(torch.device("cpu"))
        return [] if stream is self.default else [stream]

    def new_stream(self, _device: torch.device) -> StandInStream:
        self._made += 1
        return StandInStream(self, f"stream {self._made}")

    @contextmanager
    def using(self, stream: StandInStream) -> Iterator[None]:
        self._current.streams = [*getattr(self._current, "streams", []), stream]
        try:
            yield
        finally:
            self._current.streams = self._current.streams[:-1]

    def record(self, stream: StandInStream) -> StandInEvent:
        return StandInEvent(self, stream)

    def empty(self, size: int, _device: torch.device, _stream: StandInStream) -> torch.Tensor:
        if self.free_bytes is not None and size > self.free_bytes:
            raise torch.OutOfMemoryError(f"{size} bytes are not left")
        return self.put(torch.full((size,), GARBAGE, dtype=torch.uint8))

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: StandInStream) -> None:
        what, host = ("up", source) if self.has(target) else ("down", target)
        place = host.data_ptr(), host.nbytes
        with self.lock:
            self.under_way.append(place)

        def copy() -> None:
            self.note(what, stream.name)
            target.copy_(source)
            self.under_way.remove(place)

        stream.give(copy)

    def used_by(self, tensor: torch.Tensor, stream: StandInStream) -> None:
        assert self.has(tensor)
        self.note("used", stream.name)

    def register(self, address: int, size: int, _device: torch.device) -> bool:
        if self.refuses:
            return False
        assert address not in self.pinned
        self.pinned[address] = size
        self.pin_count += 1
        self.most_pinned_bytes = max(self.most_pinned_bytes, sum(self.pinned.values()))
        return True

    def unregister(self, address: int, _device: torch.device) -> None:
        with self.lock:
            end = address + self.pinned.pop(address)
            assert not [place for place in self.under_way if address < place[0] + place[1] and place[0] < end]

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor on the device."""
        memory = np.empty(max(tensor.nbytes, 1), np.uint8)
        address = memory.ctypes.data
        self._storages.add(address)
        weakref.finalize(memory, self._storages.discard, address)
        copy = torch.from_numpy(memory)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor).as_subclass(OnDevice)

    def has(self, tensor: torch.Tensor) -> bool:
        if tensor.is_nested:
            return self.has(tensor._values)
        return isinstance(tensor, OnDevice) or tensor.untyped_storage().data_ptr() in self._storages

    def catch_up(self) -> None:
        """Have the current stream do all that it was given."""
        self.current_stream(torch.device("cpu")).run()

    def concatenate(self, tensors: Any, dim: int = 0) -> torch.Tensor:
        """Stand in for `torch.cat`."""
        if not any(map(self.has, tensors)):
            return CONCATENATE(tensors, dim=dim)
        self.catch_up()
        return self.put(CONCATENATE([tensor.as_subclass(torch.Tensor) for tensor in tensors], dim=dim))

    def copied(self, values: torch.Tensor, dim: int, ranges: Any) -> torch.Tensor:
        """Stand in for the copy of rows that a micro-batch gets."""
        if not self.has(values):
            return COPIED(values, dim, ranges)
        return self.concatenate([values.narrow(dim, start, stop - start) for start, stop in ranges], dim)

    def later(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device that has its values once the current stream has run."""
        tensor = self.put(torch.full_like(values, 77))
        self.current_stream(values.device).give(lambda: tensor.copy_(values))
        return tensor

    def nested(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Return a jagged nested tensor on the device."""
        values = self.put(torch.cat(rows))
        offsets = self.put(torch.tensor([0, *np.cumsum([len(row) for row in rows])]))
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the current stream finds in a tensor."""
        assert self.has(tensor)
        seen: list[torch.Tensor] = []
        stream = self.current_stream(torch.device("cpu"))
        stream.give(lambda: seen.append(tensor.as_subclass(torch.Tensor).clone()))
        stream.run()
        return seen[0]


def set_pinned_memory(monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None) -> host_memory.PinnedMemory:
    """Make the package use pinned memory and blocks of its own, and return the former."""
    pinned, blocks = host_memory.PinnedMemory(limit_bytes), host_memory.Blocks()
    for name, module in list(sys.modules.items()):
        if name.startswith("tq_service."):
            for attribute, value in (("PINNED", pinned), ("BLOCKS", blocks)):
                if hasattr(module, attribute):
                    monkeypatch.setattr(module, attribute, value)
    return pinned


@contextmanager
def standing_in(monkeypatch: pytest.MonkeyPatch, limit_bytes: int = 64 << 20) -> Iterator[StandIn]:
    """Make the package use a stand-in, with pinned memory of its own."""
    stand_in = StandIn()
    real_cpu, real_numpy = torch.Tensor.cpu, torch.Tensor.numpy

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **arguments: Any) -> Any:
            assert not stand_in.has(tensor), "a tensor on the device is read without a stream"
            return real(tensor, *args, **arguments)

        return call

    for name in FUNCTIONS:
        monkeypatch.setattr(cuda, name, getattr(stand_in, name))
    monkeypatch.setattr(device, "_streams", {})
    set_pinned_memory(monkeypatch, limit_bytes)
    monkeypatch.setattr(OnDevice, "owner", stand_in)
    monkeypatch.setattr(torch, "cat", stand_in.concatenate)
    monkeypatch.setattr(data_columns, "_copied", stand_in.copied)
    monkeypatch.setattr(torch.Tensor, "cpu", refusing(real_cpu))
    monkeypatch.setattr(torch.Tensor, "numpy", refusing(real_numpy))
    copied_bytes = transport._copied_bytes
    heavy = transport._MOST_VALUES * transport._BYTES_A_VALUE
    monkeypatch.setattr(
        transport,
        "_copied_bytes",
        lambda value: heavy if isinstance(value, torch.Tensor) and stand_in.has(value) else copied_bytes(value),
    )
    for module in MODULES:
        monkeypatch.setattr(module, "is_on_device", stand_in.has)
    yield stand_in
