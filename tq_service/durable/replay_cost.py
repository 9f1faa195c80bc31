"""How long a start would take to make the journal again, and when a snapshot is to save it that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

# What making a record again and taking over a sample of a snapshot take, as measured.
_CHANGE_SECONDS: Final = 40e-6
_CHANGE_BYTE_SECONDS: Final = 100e-9
_PUT_SECONDS: Final = 20e-6
_PUT_BYTE_SECONDS: Final = 1e-9
_FILE_SECONDS: Final = 20e-3
_SAMPLE_SECONDS: Final = 0.7e-6
_START_SECONDS: Final = 1.1
_WORTH_SECONDS: Final = 0.4
_LOOK_SECONDS: Final = 0.01


class ReplayCost:
    """Adds up what making the records of the journal again takes, about.

    A new journal is begun with a snapshot before that and taking over the snapshot before it are longer together than a
    start may take; but no sooner than it is worth while, since the larger the state, the longer a snapshot takes.

    Attributes:
        seconds: what it takes now.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._look_at_seconds = _WORTH_SECONDS
        self._snapshot_seconds = 0.0

    def add_change(self, size: int) -> None:
        """Count a change, or an answer, of so many bytes."""
        self.seconds += _CHANGE_SECONDS + _CHANGE_BYTE_SECONDS * size

    def add_put(self, size: int) -> None:
        """Count the record of a put, of so many bytes."""
        self.seconds += _PUT_SECONDS + _PUT_BYTE_SECONDS * size

    def add_files(self, count: int) -> None:
        """Count files of the journal, of which every start leaves one."""
        self.seconds += _FILE_SECONDS * count

    def begin_anew(self) -> float:
        """Begin with an empty journal; return what the one before it takes."""
        before, self.seconds = self.seconds, 0.0
        self._look_at_seconds = _WORTH_SECONDS
        return before

    def add(self, seconds: float) -> None:
        """Count a journal that was begun anew in vain: the snapshot of what is in it could not be written."""
        self.seconds += seconds

    def note_snapshot(self, seconds: float) -> None:
        """Take note of how long a snapshot took to write."""
        self._snapshot_seconds = seconds

    def is_too_long(self, sample_count: Callable[[], int]) -> bool:
        """Whether it is time for a snapshot of so many samples; they are counted now and then only."""
        if self.seconds < self._look_at_seconds:
            return False
        self._look_at_seconds = self.seconds + _LOOK_SECONDS  # counting takes a step for each partition
        worth = max(_WORTH_SECONDS, self._snapshot_seconds)
        return self.seconds >= max(_START_SECONDS - sample_count() * _SAMPLE_SECONDS, worth)
