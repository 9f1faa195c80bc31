"""Stores objects through `obstore` in buckets (S3, Google Cloud Storage or Azure), in directories or in memory.

An object is written with a single conditional put (`If-None-Match` or similar), which fails if the name already exists.
An object is therefore stored either completely or not at all. The store itself determines how many copies of an object
it keeps. This module writes files in directories itself, because `obstore` 0.12 links a file to its name without
syncing it. A power failure could then leave an acknowledged object empty.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeAlias, cast

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from tq_service.errors import AlreadyExistsError, InvalidArgumentError, TqError, UnavailableError
from tq_service.objects.base import (
    HEADER_BYTES,
    Abilities,
    BlockingObjectStore,
    EngineUrl,
    Landing,
    ObjectMissingError,
    Survives,
    joined,
    size_of,
)

Store: TypeAlias = AzureStore | GCSStore | LocalStore | MemoryStore | S3Store

_TIMEOUT_SECONDS: Final = 30.0
_FULL: Final = ("507 ", "QuotaExceeded", "StorageFull", "InsufficientStorage", "no writable volumes")
"""Substrings of error messages that indicate that the store is full. S3 never returns such errors."""
_REFUSED: Final = (FileNotFoundError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_REFUSALS: Final = ("<Code>NoSuchBucket<", "<Code>ContainerNotFound<", "403 Forbidden", "401 Unauthorized")
_CODE: Final = re.compile("<Code>([A-Za-z0-9]+)</Code>")
_SEGMENT: Final = r"[A-Za-z0-9][A-Za-z0-9._:-]*"
_NAME: Final = re.compile(f"{_SEGMENT}(/{_SEGMENT})*")


class BucketObjects(BlockingObjectStore):
    """An object store that uses any backend supported by `obstore`."""

    engine = "obstore"

    def __init__(self, url: EngineUrl, *, threads: int = 16) -> None:
        """Create the store for a URL. Call `open` to connect to the store."""
        super().__init__(url, threads=threads, timeout_seconds=_TIMEOUT_SECONDS)
        self._open_store = self._opener(url)
        self._store: Store
        self._copy_count = url.count("copies", 1)
        default = "process" if url.scheme in ("memory", "file") else "power"
        self._survives = cast("Survives", url.choice("survives", default, ("process", "node", "power")))
        self._capacity_bytes = url.count("capacity_bytes", 0, least=0)
        is_conditional = url.flag("conditional_put", default=True)
        self._mode: Literal["create", "overwrite"] = "create" if is_conditional else "overwrite"

    def _opener(self, url: EngineUrl) -> Callable[[], Store]:
        """Return a function that opens the store for a URL."""
        if not url.host:
            raise InvalidArgumentError(
                f"object store is {url.redacted}; expected {url.scheme}://NAME or {url.scheme}://NAME/PREFIX"
            )
        if url.scheme == "memory":
            return lambda: _MEMORY.setdefault(url.location, MemoryStore())
        store = _cloud_store(url)
        return lambda: store

    @property
    def abilities(self) -> Abilities:
        return Abilities(survives=self._survives, fixed_copies=self._copy_count, lists_names=True)

    async def list_names(self, prefix: str) -> AsyncIterator[str]:
        for found in await self._run(lambda: list(self._found(prefix))):
            if found["path"].startswith(prefix):
                yield found["path"]

    def _connect(self, node: str, offered_bytes: int) -> None:
        self._store = self._open_store()
        try:
            next(iter(obstore.list(self._store, chunk_size=1)), None)
        except Exception as error:
            if isinstance(error, _REFUSED) or any(sign in str(error) for sign in _REFUSALS):
                raise InvalidArgumentError(
                    f"{self.place}: {_summary(error)}; expected an existing bucket and valid credentials"
                ) from error
            raise

    def _put(self, name: str, sealed: Sequence[memoryview], copies: int) -> int:
        if self._capacity_bytes:
            used = sum(found["size"] for found in self._found(""))
            if used + sum(map(len, sealed)) > self._capacity_bytes:
                raise self._full(f"{used} of {self._capacity_bytes} bytes are in use")
        self._create(name, sealed)
        return self._copy_count

    def _create(self, name: str, sealed: Sequence[memoryview]) -> None:
        obstore.put(self._store, name, joined(sealed), mode=self._mode, use_multipart=False)

    def _read(self, name: str, landing: Landing) -> None:
        data = memoryview(obstore.get_range(self._store, name, start=0, length=HEADER_BYTES + len(landing)))
        landing.write(data[:HEADER_BYTES], data[HEADER_BYTES:])

    def _size(self, name: str) -> int:
        return size_of(name, memoryview(obstore.get_range(self._store, name, start=0, length=HEADER_BYTES)))

    def _copies(self, names: Sequence[str]) -> list[int]:
        return [self._copy_count * self._exists(name) for name in names]

    def _exists(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            obstore.head(self._store, name)
            return True
        return False

    def _remove(self, names: Sequence[str]) -> list[str]:
        try:
            obstore.delete(self._store, list(names))
        except FileNotFoundError:  # raised for the first missing object, although later objects may exist
            for name in names:
                with suppress(FileNotFoundError):
                    obstore.delete(self._store, name)
        return []

    def _found(self, prefix: str) -> Iterator[Any]:
        directory = prefix.rpartition("/")[0]
        for page in obstore.list(self._store, prefix=directory or None, chunk_size=1000):
            yield from page

    def _error(self, error: Exception) -> TqError:
        text = _summary(error)
        if isinstance(error, FileNotFoundError):
            return ObjectMissingError(f"{self.place}: the object does not exist; it may have been removed ({text})")
        if isinstance(error, (FileExistsError, exceptions.AlreadyExistsError, exceptions.PreconditionError)):
            return AlreadyExistsError(f"{self.place}: the object already exists; retry under a new name ({text})")
        is_disk_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_disk_full or any(sign in str(error) for sign in _FULL):
            return self._full(text)
        return self._unavailable(f"{type(error).__name__}: {text}")


class DirectoryObjects(BucketObjects):
    """An object store that keeps files in a directory on a shared file system (NFS, Lustre, GPFS) or a local disk.

    An object is written to a temporary file, which is synced and then linked to the object's name. Linking fails if the
    name already exists, even on network file systems. The `survives` setting in the URL specifies the fault that files
    on this file system survive. If `survives` is `process`, files are not synced.
    """

    engine = "file system"

    def __init__(self, url: EngineUrl) -> None:
        """Create the store for a URL. Call `open` to create the directory."""
        super().__init__(url, threads=4)

    def _opener(self, url: EngineUrl) -> Callable[[], Store]:
        if url.host or not url.path:
            raise InvalidArgumentError(f"object store is {url.redacted}; expected file:///DIRECTORY with three slashes")
        self._directory = Path("/") / url.path
        return partial(LocalStore, self._directory, automatic_cleanup=True, mkdir=True)

    def _create(self, name: str, sealed: Sequence[memoryview]) -> None:
        path, part = self._directory / name, self._part(name)
        if path.exists():
            raise AlreadyExistsError(f"object {name} already exists; retry under a new name")
        file = self._open_new(part)
        try:
            with file:
                for view in sealed:
                    file.write(view)
                file.flush()
                if self._survives != "process":
                    os.fsync(file.fileno())
            os.link(part, path)
        finally:
            part.unlink(missing_ok=True)
        if self._survives != "process":
            for parent in path.parents:
                _sync(parent)
                if parent == self._directory:
                    break

    def _open_new(self, part: Path) -> BinaryIO:
        for _ in range(8):
            # A concurrent removal may delete the new directory while it is still empty.
            with suppress(FileNotFoundError):
                part.parent.mkdir(parents=True, exist_ok=True)
                return os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
        raise UnavailableError(f"could not write to {part.parent}, because other processes keep removing it; retry")

    def _remove(self, names: Sequence[str]) -> list[str]:
        for name in names:
            self._part(name).unlink(missing_ok=True)
        return super()._remove(names)

    def _part(self, name: str) -> Path:
        """Return the temporary path of an object. `obstore` does not list files with the suffix "#0"."""
        if not _NAME.fullmatch(name):  # prevent other names from being used as paths
            raise InvalidArgumentError(f"object name is {name!r}; expected letters, digits, '.', '_', ':', '-' and '/'")
        return self._directory / f"{name}#0"


_MEMORY: Final[dict[str, MemoryStore]] = {}
"""In-memory stores, by location. Services in the same process share a store if they use the same location."""


def _cloud_store(url: EngineUrl) -> Store:
    """Create the store for a bucket without contacting it.

    Raises:
        InvalidArgumentError: a setting is missing or invalid.
    """
    endpoint, timeout = url.text("endpoint", ""), url.seconds("timeout_seconds", _TIMEOUT_SECONDS)
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=min(5.0, timeout)),
        "timeout": timedelta(seconds=timeout),
        "allow_http": endpoint.startswith("http://"),
    }
    ca = url.file("ca_file")
    if ca:
        client["root_certificate"] = ca
    make: Any
    settings: dict[str, Any]
    match url.scheme:
        case "s3":  # missing settings are read from the environment, as in the AWS SDKs
            make = S3Store
            settings = {
                "endpoint": endpoint,
                "region": url.text("region", ""),
                "access_key_id": url.username or url.secret("access_key", "AWS_ACCESS_KEY_ID"),
                "secret_access_key": url.password or url.secret("secret_key", "AWS_SECRET_ACCESS_KEY"),
                "virtual_hosted_style_request": not url.flag("path_style", default=bool(endpoint)),
            }
        case "gs":
            make = GCSStore
            settings = {"base_url": endpoint, "service_account": url.text("service_account_file", "")}
        case _:
            make = AzureStore
            settings = {
                "endpoint": endpoint,
                "account_name": url.text("account", ""),
                "account_key": url.secret("account_key", "AZURE_STORAGE_ACCOUNT_KEY"),
            }
    try:
        store: Store = make(
            url.host,
            prefix=url.path or None,
            client_options=client,
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=timeout)},
            **{name: value for name, value in settings.items() if value not in (None, "")},
        )
    except (ValueError, exceptions.BaseError) as error:
        raise InvalidArgumentError(f"{url.redacted}: {_summary(error)}; see docs/engines.md") from error
    return store


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _summary(error: Exception) -> str:
    """Return a store's error message without the trailing HTTP details."""
    text = str(error)
    code = _CODE.search(text)
    return f"{text.partition(chr(10))[0][:200]}{f' ({code[1]})' if code else ''}"
