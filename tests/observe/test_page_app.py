"""The page's web server, without a browser: what it answers, to which hosts, and below which path."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import httpx
import pytest
from page_server import running_page
from page_statuses import partition, status
from test_page_feed import FakeClient

from tq_service.errors import InvalidArgumentError, UnavailableError
from tq_service.observe.page import app as page_app
from tq_service.observe.page.app import listen, make_app
from tq_service.observe.page.feed import Feed

ASSETS = resources.files("tq_service.observe.page") / "assets"
HOSTILE = "<script>alert(1)</script>\n\nevent: frame\ndata: {}"


async def frames_at(web: httpx.AsyncClient, url: str, number: int) -> list[dict[str, Any]]:
    """Return the first frames of the stream at a URL."""
    found: list[dict[str, Any]] = []
    async with web.stream("GET", url) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == number:
                return found
    return found


async def test_the_page_and_its_assets_are_served_with_headers_that_bound_it() -> None:
    async with running_page(FakeClient(status())) as page, httpx.AsyncClient() as web:
        index = await web.get(f"{page}/")
        assert index.status_code == 200
        links = re.findall(r'(?:href|src)="([^"#]+)"', index.text)
        assert links and not [link for link in links if link.startswith(("/", "http", "//"))]
        for link in links:
            answer = await web.get(f"{page}/{link}")
            assert answer.status_code == 200, link
            again = await web.get(f"{page}/{link}", headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for answer in (index, await web.get(f"{page}/nothing"), await web.get(f"{page}/assets/../app.py")):
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"
            assert "access-control-allow-origin" not in answer.headers
        assert (await web.get(f"{page}/nothing")).status_code == 404
        head = await web.head(f"{page}/events")
        assert (head.status_code, head.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        for path in ("/", "/events", "/assets/page.js"):
            assert (await web.post(f"{page}{path}")).status_code == 405


async def test_the_stream_has_frames_from_the_first_on_whatever_names_say() -> None:
    client = FakeClient(UnavailableError("connection refused"), status(partition(HOSTILE)))
    async with running_page(client) as page, httpx.AsyncClient() as web:
        *_, last = await frames_at(web, f"{page}/events", 3)
        assert last["status"]["partitions"][0]["summary"]["partition_id"] == HOSTILE
        assert [event["kind"] for event in last["events"]][:1] == ["away"]


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost", 200), ("LOCALHOST:8080", 200), ("tq.localhost", 200), ("127.0.0.1:1", 200), ("[::1]:8080", 200),
        ("10.1.2.3", 200), ("tq.example:8080", 200), ("tq.example.", 200), ("evil.example", 421),
        ("127.0.0.1.evil.example", 421), ("localhost.evil.example:80", 421), ("", 421), ("[::1", 200), ("[evil]", 421),
        ("sub.tq.example", 421),
    ],
)  # fmt: skip
async def test_a_name_that_another_site_may_have_led_here_is_refused(host: str, code: int) -> None:
    app = make_app(Feed(FakeClient(status())), allowed_hosts=["TQ.example"])  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as web:
        answer = await web.get("/", headers={"Host": host})
        assert answer.status_code == code
        assert "content-security-policy" in answer.headers


async def test_below_a_path_it_is_there_for_proxies_that_strip_it_and_for_those_that_do_not() -> None:
    client = FakeClient(status(partition()))
    async with running_page(client, root_path="/a/tq/") as page, httpx.AsyncClient() as web:
        for prefix in ("", "/a/tq"):
            assert (await web.get(f"{page}{prefix}/")).status_code == 200
            assert (await web.get(f"{page}{prefix}/assets/page.css")).status_code == 200
            assert await frames_at(web, f"{page}{prefix}/events", 1)
        slash = await web.get(f"{page}/a/tq")
        assert (slash.status_code, slash.headers["location"]) == (308, "/a/tq/")


@pytest.mark.parametrize("path", ["tq", "//evil.example", "/a b", "/{x}", "/a?b", "/\\evil.example"])
def test_a_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgumentError, match="root_path"):
        make_app(Feed(FakeClient(status())), root_path=path)  # type: ignore[arg-type]


async def test_browsers_are_bounded_and_one_that_leaves_makes_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_app, "_MOST_STREAMS", 2)
    async with running_page(FakeClient(status())) as page, httpx.AsyncClient() as web:
        async with web.stream("GET", f"{page}/events") as first, web.stream("GET", f"{page}/events") as second:
            for answer in (first, second):
                assert await anext(answer.aiter_lines()) == "retry: 2000"
            refused = await web.get(f"{page}/events")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        while (await _head(web, f"{page}/events")) == 503:
            pass
        assert await frames_at(web, f"{page}/events", 1)


async def _head(web: httpx.AsyncClient, url: str) -> int:
    async with web.stream("GET", url) as answer:
        return answer.status_code


async def test_it_stops_while_browsers_look() -> None:
    async with httpx.AsyncClient() as web:
        async with running_page(FakeClient(status())) as page:
            request = web.build_request("GET", f"{page}/events")
            answer = await web.send(request, stream=True)
            lines = answer.aiter_lines()
            assert await anext(lines) == "retry: 2000"
        assert [line async for line in lines][-1] == ""  # the stream has ended, and was not cut
        await answer.aclose()


async def test_an_error_of_the_page_ends_it_rather_than_leaving_it_stale() -> None:
    with pytest.raises(ZeroDivisionError):
        async with (
            running_page(FakeClient(status(), ZeroDivisionError())) as page,
            httpx.AsyncClient() as web,
            web.stream("GET", f"{page}/events") as answer,
        ):
            async for _ in answer.aiter_lines():
                pass


def test_a_port_that_is_taken_is_one_line() -> None:
    taken = listen("127.0.0.1", 0)
    with taken, pytest.raises(InvalidArgumentError, match=r"cannot listen on 127\.0\.0\.1:\d+: .*choose another"):
        taken.listen()
        listen("127.0.0.1", taken.getsockname()[1])


def test_nothing_is_loaded_from_elsewhere_and_nothing_is_written_as_markup() -> None:
    for asset in ASSETS.iterdir():
        text = asset.read_text()
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), asset.name
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|@import|url\(", text), (
            asset.name
        )
    index = (ASSETS / "index.html").read_text()
    assert not re.findall(r"<style|style=|\son\w+=|<script>", index)


def test_texts_have_the_contrast_that_reading_takes() -> None:
    css = (ASSETS / "page.css").read_text()
    themes = re.findall(r":root[^{]*\{\s*color-scheme: \w+;(.*?)\}", css, re.DOTALL)
    assert len(themes) == 3 and themes[1].split() == themes[2].split()
    for theme in themes:
        colors = dict(re.findall(r"--([\w-]+): (#\w{6})", theme))
        pairs = [
            (text, back) for text in ("text", "soft", "accent", "good", "warn", "bad") for back in ("panel", "page")
        ]
        pairs += [
            ("text", "raised"),
            ("soft", "raised"),
            ("warn", "warn-back"),
            ("bad", "bad-back"),
            ("accent", "accent-soft"),
        ]
        assert {pair: ratio for pair in pairs if (ratio := contrast(*(colors[name] for name in pair))) < 4.5} == {}


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colors as WCAG 2 defines it."""

    def luminance(color: str) -> float:
        parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
