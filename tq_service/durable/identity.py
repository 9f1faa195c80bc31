"""What a data folder is: made with it, and the same for as long as it is there."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tq_service.durable.files import sync_path
from tq_service.errors import DataDirError

FORMAT_VERSION: Final = 2
_BOOT_ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Names that outlive the process.

    Attributes:
        controller_boot_id: 16 bytes, of the controller that keeps its state in the folder.
        storage_boot_id: 16 bytes, of the storage service that keeps its puts there.
        storage_id: name of that storage service, by which samples say where their cells are; empty until it has one.
    """

    controller_boot_id: bytes
    storage_boot_id: bytes
    storage_id: str = ""


def new_identity() -> Identity:
    """Return an identity that no other folder has."""
    return Identity(
        controller_boot_id=secrets.token_bytes(_BOOT_ID_BYTES), storage_boot_id=secrets.token_bytes(_BOOT_ID_BYTES)
    )


def write_identity(path: Path, identity: Identity) -> None:
    """Write an identity, whole or not at all; it survives a loss of power.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(
        {
            "format_version": FORMAT_VERSION,
            "controller_boot_id": identity.controller_boot_id.hex(),
            "storage_boot_id": identity.storage_boot_id.hex(),
            "storage_id": identity.storage_id,
        },
        indent=2,
    )
    unfinished = path.with_name(path.name + ".new")
    with unfinished.open("w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_path(path.parent)


def read_identity(path: Path) -> Identity | None:
    """Return the identity in a file, None where there is no file.

    Raises:
        DataDirError: the file is damaged, or of another format.
        OSError: it cannot be read.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        values = json.loads(text)
        version = int(values["format_version"])
        if version > FORMAT_VERSION:
            raise DataDirError(
                f"the data dir {path.parent} has format {version}, this version of the service reads formats up to "
                f"{FORMAT_VERSION}; install the version that wrote it, or a later one"
            )
        if version < FORMAT_VERSION:
            raise DataDirError(
                f"the data dir {path.parent} has format {version}, which this version of the service reads no more; "
                f"start it with the version that wrote it, or name an empty folder"
            )
        identity = Identity(
            controller_boot_id=bytes.fromhex(values["controller_boot_id"]),
            storage_boot_id=bytes.fromhex(values["storage_boot_id"]),
            storage_id=str(values["storage_id"]),
        )
        if {len(identity.controller_boot_id), len(identity.storage_boot_id)} != {_BOOT_ID_BYTES}:
            raise ValueError(f"boot ids have {_BOOT_ID_BYTES} bytes")
    except (ValueError, TypeError, KeyError) as error:
        raise DataDirError(f"{path} cannot be read: {error!r}; restore a checkpoint into an empty folder") from None
    return identity
