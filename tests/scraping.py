"""Scrapes of a service that runs in the process of the tests."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from live_server import LiveServer
from prometheus_client.parser import text_string_to_metric_families as parse_text


class Answer(NamedTuple):
    status: int
    kind: str
    text: str


def fetch(
    live: LiveServer, path: str = "/metrics", *, tls: ssl.SSLContext | None = None, method: str = "GET", **headers: str
) -> Answer:
    assert live.app.metrics is not None
    scheme = "http" if tls is None else "https"
    url = f"{scheme}://127.0.0.1:{live.app.metrics.port}{path}"
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        answer = urllib.request.urlopen(request, timeout=20, context=tls)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return Answer(answer.status, answer.headers["Content-Type"], answer.read().decode())


def scrape(live: LiveServer, **options: Any) -> dict[tuple[str, ...], float]:
    """Return the values by name and the values of their labels, in the order of the labels' names."""
    text = fetch(live, **options).text
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }
