"""A small server that speaks as much of S3, Google's XML and Azure's API as the engine uses, with faults on request."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

CAPACITY_BYTES = 8_000_000
"""Of the bucket `full`."""


class BucketStandIn:
    """Buckets `objects` and `full` in memory.

    Attributes:
        port: of loopback, where it listens.
        objects: bytes by bucket and key.
        answers: cleared, requests wait.
        refusals: what the next requests are answered with instead: status and code.
        requests: method and path of each request.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.objects: dict[tuple[str, str], bytes] = {}
        self.answers = threading.Event()
        self.answers.set()
        self.refusals: list[tuple[int, str]] = []
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self._open(0)

    def _open(self, port: int) -> None:
        handler = type("Handler", (_Handler,), {"stand_in": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        if self._tls is not None:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def restart(self) -> None:
        self.close()
        self._open(self.port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    stand_in: BucketStandIn
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _answer(self, call: Callable[[str, str, dict[str, list[str]], bytes], None]) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        if len(body) < size:  # the client was killed: a bucket keeps nothing of an upload that was cut off
            self.close_connection = True
            return
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        self.stand_in.requests.append((self.command, self.path))
        self.stand_in.answers.wait()
        if self.stand_in.refusals:
            self._fail(*self.stand_in.refusals.pop(0))
        elif bucket not in ("objects", "full"):
            self._fail(404, "NoSuchBucket")
        elif re.match("AWS4(?!.*Credential=key/)", self.headers.get("Authorization", "")):
            self._fail(403, "InvalidAccessKeyId")
        else:
            with self.stand_in.lock:
                call(bucket, key, parse_qs(url.query, keep_blank_values=True), body)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def do_POST(self) -> None:
        self._answer(self._delete_many)

    def _put(self, bucket: str, key: str, query: dict[str, list[str]], body: bytes) -> None:
        objects = self.stand_in.objects
        is_new = self.headers.get("If-None-Match") == "*" or self.headers.get("x-goog-if-generation-match") == "0"
        if is_new and (bucket, key) in objects:
            self._fail(409 if self._is_azure else 412, "PreconditionFailed")
        elif (
            bucket == "full"
            and len(body) + sum(len(v) for (b, _), v in objects.items() if b == bucket) > CAPACITY_BYTES
        ):
            self._fail(507, "XMinioStorageFull")
        else:
            objects[bucket, key] = body
            self._send(201 if self._is_azure else 200, b"", {"ETag": '"e"', "x-goog-generation": "1"})

    @property
    def _is_azure(self) -> bool:
        return "x-ms-version" in self.headers

    def _get(self, bucket: str, key: str, query: dict[str, list[str]], body: bytes) -> None:
        if not key:
            self._list(bucket, query)
            return
        data = self.stand_in.objects.get((bucket, key))
        if data is None:
            self._fail(404, "NoSuchKey")
            return
        headers = {"ETag": '"e"', "Last-Modified": "Thu, 26 Nov 2026 00:00:00 GMT", "x-goog-generation": "1"}
        wanted = self.headers.get("Range")
        if wanted is None:
            self._send(200, data, headers)
            return
        first, last = (int(each) for each in wanted.removeprefix("bytes=").split("-"))
        if first >= len(data):
            self._fail(416, "InvalidRange")
            return
        part = data[first : last + 1]
        self._send(206, part, headers | {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"})

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        after = query.get("marker" if self._is_azure else "continuation-token", [""])[0]
        keys = sorted(k for b, k in self.stand_in.objects if b == bucket and k.startswith(prefix) and k > after)
        page, more = keys[:7], len(keys) > 7
        if self._is_azure:
            blobs = "".join(
                f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>Thu, 26 Nov 2026 00:00:00 GMT"
                f"</Last-Modified><Content-Length>{len(self.stand_in.objects[bucket, key])}</Content-Length>"
                "<Content-Type>b</Content-Type><Etag>e</Etag></Properties></Blob>"
                for key in page
            )
            marker = escape(page[-1]) if more else ""
            text = f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker>{marker}</NextMarker></EnumerationResults>"
            self._send(200, text.encode(), {"Content-Type": "application/xml"})
            return
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-26T00:00:00.000Z</LastModified><ETag>e</ETag>"
            f"<Size>{len(self.stand_in.objects[bucket, key])}</Size></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
        self._send(200, text.encode(), {"Content-Type": "application/xml"})

    def _delete(self, bucket: str, key: str, query: dict[str, list[str]], body: bytes) -> None:
        if self.stand_in.objects.pop((bucket, key), None) is None:
            self._fail(404, "NoSuchKey")
        else:
            self._send(204, b"", {})

    def _delete_many(self, bucket: str, key: str, query: dict[str, list[str]], body: bytes) -> None:
        if self._is_azure:
            self._delete_batch(body.decode())
            return
        deleted = ""
        for element in ElementTree.fromstring(body).iter():
            if element.tag.rpartition("}")[2] == "Key" and element.text:
                self.stand_in.objects.pop((bucket, element.text), None)
                deleted += f"<Deleted><Key>{escape(element.text)}</Key></Deleted>"
        self._send(200, f"<DeleteResult>{deleted}</DeleteResult>".encode(), {"Content-Type": "application/xml"})

    def _delete_batch(self, body: str) -> None:
        answers = ""
        for number, path in enumerate(re.findall("^DELETE (\\S+)", body, re.MULTILINE)):
            bucket, _, key = unquote(path).lstrip("/").partition("/")
            gone = self.stand_in.objects.pop((bucket, key), None) is None
            status = "404 Not Found\r\nx-ms-error-code: BlobNotFound" if gone else "202 Accepted"
            answers += (
                "--batch\r\nContent-Type: application/http\r\n"
                f"Content-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\nx-ms-request-id: 1\r\n\r\n\r\n"
            )
        answers += "--batch--\r\n"
        self._send(202, answers.encode(), {"Content-Type": "multipart/mixed; boundary=batch"})

    def _fail(self, status: int, code: str) -> None:
        self._send(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode(), {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log."""
