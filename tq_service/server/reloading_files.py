"""Reading files again that were replaced while the service runs, but never a half-written one."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from pathlib import Path

from tq_service.errors import InvalidArgumentError
from tq_service.log_message import LogMessage
from tq_service.wire.connection import Signature, file_signature

_log = logging.getLogger(__name__)


class ReloadingFiles(ABC):
    """Files that belong together, which are read once, and again when they have changed.

    They are read when they have changed and then stayed the same from one look to the next: a file that is written in
    its place is empty for a moment, and an empty file of tokens is a valid one. What cannot be used is logged once and
    tried again at each look, since what was wrong may not show in the files: their mode, or too many open files.

    Args:
        *paths: where they are; None for one that is not in use.
        what_stays: what is said of the time until they can be used.

    Raises:
        InvalidArgumentError: they cannot be used.
    """

    def __init__(self, *paths: Path | None, what_stays: str) -> None:
        self._paths = paths
        self._what_stays = what_stays
        self._taken = self._seen = self._signature()
        self._refused = ""
        self._read()

    def _signature(self) -> Signature:
        return tuple(map(file_signature, self._paths))

    @abstractmethod
    def _read(self) -> None:
        """Read the files, and use them from now on; raises InvalidArgumentError where that cannot be."""

    def reload(self) -> None:
        """Read the files again if they have changed since, and no longer change."""
        signature = self._signature()
        has_settled, self._seen = signature == self._seen, signature
        if not has_settled or signature == self._taken:
            return
        try:
            self._read()
        except InvalidArgumentError as error:
            if str(error) != self._refused:
                _log.error(LogMessage(f"a changed file cannot be used; {self._what_stays}", error=error))
            self._refused = str(error)
        else:
            self._taken, self._refused = signature, ""
