"""The live page on a port of its own, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from tq_service.observe.page.app import listen, make_app, serve_page
from tq_service.observe.page.feed import Feed


@asynccontextmanager
async def running_page(
    client: Any, *, root_path: str = "", allowed_hosts: Iterable[str] = (), interval_seconds: float = 0.05
) -> AsyncIterator[str]:
    """Serve the page of a client, and give its address, "http://127.0.0.1:port"."""
    feed = Feed(client, interval_seconds=interval_seconds)
    app = make_app(feed, root_path=root_path, allowed_hosts=allowed_hosts)
    bound, stop, started = listen("127.0.0.1", 0), asyncio.Event(), asyncio.Event()
    address = f"http://127.0.0.1:{bound.getsockname()[1]}"
    serving = asyncio.create_task(serve_page(feed, app, bound, stop=stop, on_started=started.set))
    waiting = asyncio.create_task(started.wait())
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    try:
        if started.is_set():
            yield address
    finally:
        stop.set()
        await serving
