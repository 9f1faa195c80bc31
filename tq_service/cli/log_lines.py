"""Configures where log lines and audit entries are written, and in which format."""

from __future__ import annotations

import json
import logging
import logging.handlers
import time
from pathlib import Path
from typing import Any

from tq_service.errors import InvalidArgumentError
from tq_service.log_message import LogMessage

# Copied from the server, because importing the server would slow down --help.
AUDIT_LOGGER = "tq_service.audit"


class _TextFormatter(logging.Formatter):
    """Formats a record as a readable line. The message is escaped, so text from clients cannot forge log lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        record.message = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode() for each in record.message
        )
        return super().formatMessage(record)


class _JsonFormatter(logging.Formatter):
    """Formats a log record as a line of JSON that includes the fields of the record's `LogMessage` or audit entry."""

    def format(self, record: logging.LogRecord) -> str:
        line: Any = vars(record).get("audit")
        level = record.levelname.lower() if line is None else "audit"
        facts: dict[str, Any] = {"time": _moment(record), "level": level, "logger": record.name}
        if line is not None:
            facts |= line.shown()
        elif isinstance(record.msg, LogMessage):
            facts = record.msg.fields | facts | {"message": record.msg.text}
        else:
            facts |= {"message": record.getMessage()}
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts)


class _AuditTextFormatter(logging.Formatter):
    """Formats an audit record as a readable line. Text from clients has already been escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_moment(record)} AUDIT   {record.getMessage()}"


def configure_logging(level: str, style: str, audit_file: Path | None = None) -> None:
    """Configure logging to stderr, and configure the audit log.

    Args:
        level: minimum level to log. The audit log ignores this level.
        style: "text" for readable lines, or "json" for one JSON object per line.
        audit_file: file to which audit entries are appended. The file is reopened after log rotation. None for stderr.

    Raises:
        InvalidArgumentError: `audit_file` cannot be written.
    """
    handler = logging.StreamHandler()
    if style == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(_TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("grpc", "asyncio"):  # debug and info lines of these libraries are not useful to operators
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        audit_handler: logging.Handler = (
            logging.StreamHandler() if audit_file is None else logging.handlers.WatchedFileHandler(audit_file)
        )
    except OSError as error:
        raise InvalidArgumentError(f"the audit file {audit_file} cannot be written: {error.strerror}") from None
    audit_handler.setFormatter(_JsonFormatter() if style == "json" else _AuditTextFormatter())
    audit = logging.getLogger(AUDIT_LOGGER)
    audit.handlers[:] = [audit_handler]
    audit.setLevel(logging.INFO)
    audit.propagate = False


def _moment(record: logging.LogRecord) -> str:
    """Return the UTC time of a record in ISO 8601 format."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
