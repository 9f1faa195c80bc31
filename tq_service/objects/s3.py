"""Objects in a bucket of S3, or of a store that speaks its protocol, through `obstore` (extra `s3`).

`s3://BUCKET/PREFIX?endpoint=https://HOST:PORT&region=us-east-1`. An object is one PUT that must not find its name
(`If-None-Match`), so that it is there whole or not at all; the copies are the store's own affair.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import obstore
from obstore import exceptions
from obstore.store import S3Store

from tq_service.errors import AlreadyExistsError, InvalidArgumentError, QuotaExceededError, TqError
from tq_service.objects.base import Abilities, Capacity, ObjectMissingError
from tq_service.objects.options import EngineUrl
from tq_service.objects.sealed import HEADER_BYTES, check, joined, size_of
from tq_service.objects.threaded import RETRY_AFTER_SECONDS, ThreadedObjects
from tq_service.objects.threads import Landing

_REFUSED: Final = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_FULL: Final = ("507 ", "QuotaExceeded", "StorageFull", "InsufficientStorage", "no writable volumes")
"""What stores answer that take no more; S3 itself has no such answer."""
_WRONG: Final = ("<Code>NoSuchBucket<", "403 Forbidden", "401 Unauthorized")
_CODE: Final = re.compile("<Code>([A-Za-z0-9]+)</Code>")
_PROBES_AT_A_TIME: Final = 8


class S3Objects(ThreadedObjects):
    """Objects in a bucket.

    Credentials are those of the URL (`s3://KEY:SECRET@BUCKET`), else of the files of `access_key_file` and
    `secret_key_file`, else of AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, else what the AWS SDKs
    find: a web identity, a container's or an instance's role.
    """

    engine = "S3"

    def __init__(self, url: EngineUrl) -> None:
        threads = url.count("threads", 16)
        timeout_seconds = url.seconds("timeout_seconds", 30.0)
        super().__init__(url.redacted, threads=threads, timeout_seconds=timeout_seconds)
        if not url.host:
            raise InvalidArgumentError(f"got {url.redacted}, expected s3://BUCKET or s3://BUCKET/PREFIX")
        self._copy_count = url.count("copies", 1)
        self._survives: Literal["node", "power"] = (
            "power" if url.choice("survives", "power", ("node", "power")) == "power" else "node"
        )
        self._mode: Literal["create", "overwrite"] = (
            "create" if url.flag("conditional_put", default=True) else "overwrite"
        )
        self._store = self._make_store(url)
        self._probes = ThreadPoolExecutor(_PROBES_AT_A_TIME, "tq-s3-probe")

    @classmethod
    def from_url(cls, url: str) -> S3Objects:
        """Make the engine that a URL describes."""
        parsed = EngineUrl(url)
        made = cls(parsed)
        parsed.check_all_used()
        return made

    @property
    def abilities(self) -> Abilities:
        return Abilities(survives=self._survives, fixed_copies=self._copy_count, lists_by_prefix=True)

    def _make_store(self, url: EngineUrl) -> S3Store:
        endpoint = url.text("endpoint", "")
        client: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=min(5.0, self.timeout_seconds)),
            "timeout": timedelta(seconds=self.timeout_seconds),
            "allow_http": endpoint.startswith("http://"),
        }
        ca_file = url.text("ca_file", "")
        if ca_file:
            try:
                client["root_certificate"] = Path(ca_file).read_bytes()
            except OSError as error:
                raise InvalidArgumentError(f"{url.redacted}: ca_file {ca_file} cannot be read: {error}") from error
        settings: dict[str, Any] = {
            "region": url.text("region", "") or None,
            "endpoint": endpoint or None,
            "access_key_id": url.username or url.secret("access_key", "AWS_ACCESS_KEY_ID"),
            "secret_access_key": url.password or url.secret("secret_key", "AWS_SECRET_ACCESS_KEY"),
            "virtual_hosted_style_request": not url.flag("path_style", default=bool(endpoint)),
        }
        return S3Store(
            url.host,
            prefix=url.path or None,
            client_options=client,  # type: ignore[arg-type]  # a TypedDict whose keys are optional
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=self.timeout_seconds)},
            **{name: value for name, value in settings.items() if value is not None},
        )

    def _connect(self, node: str, offered_bytes: int) -> None:
        try:
            next(iter(obstore.list(self._store, chunk_size=1)), None)
        except Exception as error:
            if isinstance(error, (FileNotFoundError, *_REFUSED)) or any(sign in str(error) for sign in _WRONG):
                raise InvalidArgumentError(
                    f"{self.place}: {_summary(error)}; expected a bucket that is there, and credentials for it"
                ) from error
            raise

    def _put(self, name: str, header: bytes, views: Sequence[memoryview], copies: int) -> int:
        obstore.put(self._store, name, joined(header, views), mode=self._mode, use_multipart=False)
        return self._copy_count

    def _read(self, name: str, landing: Landing, start: int) -> None:
        size = len(landing.view)
        if not start:
            data = memoryview(obstore.get_range(self._store, name, start=0, length=HEADER_BYTES + size))
            header, rest = data[:HEADER_BYTES], data[HEADER_BYTES:]
        else:
            header = memoryview(obstore.get_range(self._store, name, start=0, length=HEADER_BYTES))
            check_range = min(size, max(0, size_of(name, header) - start))
            rest = memoryview(b"")
            if check_range:
                first = HEADER_BYTES + start
                rest = memoryview(obstore.get_range(self._store, name, start=first, length=check_range))
        landing.write(0, rest[:size])
        check(name, header, start, landing.view)

    def _copies(self, names: Sequence[str]) -> list[int]:
        return list(self._probes.map(self._copies_of, names))

    def _copies_of(self, name: str) -> int:
        try:
            obstore.head(self._store, name)
        except FileNotFoundError:
            return 0
        return self._copy_count

    def _remove(self, names: Sequence[str]) -> list[str]:
        obstore.delete(self._store, list(names))
        return []

    def _size(self, name: str) -> int:
        return size_of(name, memoryview(obstore.get_range(self._store, name, start=0, length=HEADER_BYTES)))

    def _capacity(self) -> Capacity:
        return Capacity()

    def _list(self, prefix: str) -> list[str]:
        directory = prefix.rpartition("/")[0]
        pages = obstore.list(self._store, prefix=directory or None, chunk_size=1000)
        return [found["path"] for page in pages for found in page if found["path"].startswith(prefix)]

    def _close(self) -> None:
        self._probes.shutdown(wait=False, cancel_futures=True)

    def _error(self, error: Exception) -> TqError:
        text = _summary(error)
        if isinstance(error, FileNotFoundError):
            return ObjectMissingError(f"{self.place}: no such object, it was removed ({text})")
        if isinstance(error, (exceptions.AlreadyExistsError, exceptions.PreconditionError)):
            return AlreadyExistsError(f"{self.place}: the object is there; take another attempt's name ({text})")
        if any(sign in str(error) for sign in _FULL):
            message = f"{self.place} is full ({text}); remove objects or make it larger"
            return QuotaExceededError(message, retry_after_seconds=RETRY_AFTER_SECONDS)
        return self.unavailable(f"{type(error).__name__}: {text}")


def _summary(error: Exception) -> str:
    """Return what the store answered; the rest of a message repeats it with the details of the HTTP client."""
    text = str(error)
    code = _CODE.search(text)
    return f"{text.partition(chr(10))[0][:200]}{f' ({code[1]})' if code else ''}"
