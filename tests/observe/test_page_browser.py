"""The live page in a real browser: a headless Chromium looks at it while a service works, dies and comes back."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest
from live_server import LoopThread
from page_server import running_page
from page_statuses import mirror, mirrored, status, storage

import tq_service as tq
from tq_service.results import ServiceStatus
from tq_service.testing import ServiceProcess

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)"
)

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,1000",
)  # fmt: skip
HOSTILE = "train/<img src=x onerror=document.title='owned'>"
LONG = "train/" + "a-name-without-a-place-to-break-" * 4


class Page:
    """What a person sees and does."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def one(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)"
        found: list[str] = self.browser.execute_script(script, selector)
        return found

    def text(self, selector: str) -> str:
        return " ".join(self.texts(selector))

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        return WebDriverWait(self.browser, 20, poll_frequency=0.05).until(lambda _: condition(), what)

    def script(self, text: str) -> Any:
        return self.browser.execute_script(text)

    def row(self, name: str) -> str:
        """Return the numbers of the row of a partition or task."""
        rows = [text for text in self.texts(".row") if name in text]
        return rows[0] if rows else ""

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


class FakeClient:
    """Answers `status` with one status, whatever it is by then."""

    address, namespace = "tq.example:50051", ""

    def __init__(self) -> None:
        self.answer = status()

    async def status(self, **_: Any) -> ServiceStatus:
        return self.answer

    @asynccontextmanager
    async def watch(self, *_: Any, **__: Any) -> AsyncIterator[AsyncIterator[Any]]:
        async def nothing() -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield

        yield nothing()


@asynccontextmanager
async def page_of(address: str) -> Any:
    async with (
        tq.AsyncClient(address, token=False, tls=False, namespace=False) as client,
        running_page(client, interval_seconds=0.2) as url,
    ):
        yield url


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(data_dir=tmp_path_factory.mktemp("data")) as service:
        yield service


@pytest.fixture(scope="module")
def url(service: ServiceProcess, loop_thread: LoopThread) -> Iterator[str]:
    page = page_of(service.address)
    yield loop_thread.run(page.__aenter__())
    loop_thread.run(page.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield chromium
    finally:
        chromium.quit()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Page]:
    browser.get("about:blank")
    page = Page(browser)
    page.resize(1400, 1000)
    browser.get(f"{url}/")
    page.wait(lambda: page.text("#state-text") == "serving", "the first frame")
    yield page
    assert browser.get_log("browser") == []


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[tq.Client]:
    with tq.Client(service.address) as client:
        yield client
        for summary in client.list_partitions():
            client.clear_partition(summary.partition_id)


@contextmanager
def waiting(service: ServiceProcess, **asked: Any) -> Iterator[None]:
    """Have a claim wait until the end of the block."""
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        other = tq.Client(service.address)
        claim = threads.submit(other.get_meta, **{"batch_size": 8, "max_wait": 60.0, **asked})
        yield
        other.close()
        assert claim.exception() is not None


def test_an_empty_service_says_what_to_do_and_a_load_is_followed(
    page: Page, client: tq.Client, service: ServiceProcess
) -> None:
    assert page.one("#empty").is_displayed()
    assert f'tq.Client("{service.address}")' in page.text("#empty-code")
    client.create_partition("train@10", expected_samples=8)
    client.put("train@10", {"x": np.zeros(4)})
    page.wait(lambda: "4 / 8" in page.row("train@10"), "4 of 8 samples")
    assert not page.one("#empty").is_displayed()
    client.put("train@10", {"x": np.zeros(4), "y": np.ones(4)})
    page.wait(lambda: "8 / 8" in page.row("train@10") and "sealed" in page.row("train@10"), "sealed")
    client.get_meta(partition_id="train@10", task_name="reward", data_fields=["x"], batch_size=6, lease=60.0)
    page.wait(lambda: "6 / 8" in page.row("reward"), "6 delivered")
    page.wait(lambda: page.text("#tiles article:last-child .number") == "6", "6 leased")
    client.create_partition("train@9")
    page.wait(lambda: len(page.texts(".partition")) == 2, "two partitions")
    assert [re.sub("(open|sealed).*", "", name) for name in page.texts(".whole .name")] == ["train@10 ", "train@9 "]
    client.clear_partition("train@10")
    page.wait(lambda: len(page.texts(".partition")) == 1, "one partition")
    assert page.script("return document.querySelectorAll('.spark path[d^=M]').length") > 0


def test_waits_are_said_in_words_and_names_are_only_text(
    page: Page, client: tq.Client, service: ServiceProcess
) -> None:
    client.put(HOSTILE, {"reward": np.zeros(3)})
    claim = {"partition_id": HOSTILE, "task_name": "<b>judge</b>", "data_fields": ["rewrd"]}
    with waiting(service, **claim), waiting(service, **claim, min_batch_size=2):
        page.wait(lambda: len(page.texts("#waits li")) == 2, "a line for each way of waiting")
        page.wait(lambda: "has field 'rewrd'" in page.text("#waits"), "the reason")
        page.wait(lambda: "field rewrd, which was never put" in page.row("<b>judge</b>"), "the reason in short")
        page.one(".more").click()
        page.wait(lambda: "has field 'rewrd'" in page.text(".details .waits"), "the reason in the details")
    assert page.one(".more").text == HOSTILE
    assert page.script("return document.querySelectorAll('img, b b').length") == 0
    assert "owned" not in page.browser.title


def test_it_is_worked_by_keyboard_and_what_has_focus_keeps_it(page: Page, client: tq.Client) -> None:
    for number in range(3):
        client.put(f"train@{number}", {"x": np.zeros(1)})
    page.wait(lambda: len(page.texts(".partition")) == 3, "three partitions")
    body = page.one("body")
    body.send_keys("/")
    assert page.script("return document.activeElement.id") == "filter"
    page.one("#filter").send_keys("@1")
    page.wait(lambda: len(page.texts(".partition")) == 1, "one partition")
    page.one("#filter").send_keys(Keys.ESCAPE)
    page.wait(lambda: len(page.texts(".partition")) == 3, "three again")
    page.one("#filter").send_keys(Keys.TAB)
    focused = page.browser.switch_to.active_element
    assert (focused.text, focused.get_attribute("aria-expanded")) == ("train@2", "false")
    focused.send_keys(Keys.ENTER)
    page.wait(lambda: focused.get_attribute("aria-expanded") == "true", "the details")
    client.put("train@2", {"x": np.zeros(4)})
    client.put("train@10", {"x": np.zeros(4)})  # stands before it
    page.wait(lambda: len(page.texts(".partition")) == 4 and page.text(".fields").endswith("5 / 5"), "the next frame")
    assert page.browser.switch_to.active_element == focused
    assert page.script("return getComputedStyle(document.activeElement).outlineStyle") != "none"
    focused.send_keys(Keys.SPACE)
    page.wait(lambda: not page.texts(".details"), "no details")
    controls = "[...document.querySelectorAll('button, input, a')]"
    assert page.script(f"return {controls}.filter((each) => !each.textContent && !each.labels?.length).length") == 0


def test_light_and_dark_follow_the_system_until_a_theme_is_chosen(page: Page) -> None:
    def background() -> str:
        color: str = page.script("return getComputedStyle(document.body).backgroundColor")
        return color

    light = background()
    page.resize(1400, 1000, "dark")
    dark = background()
    assert light != dark
    button = page.one("#theme")
    button.click()
    assert (page.text("#theme-name"), background()) == ("light", light)
    page.browser.refresh()
    page.wait(lambda: page.text("#state-text") == "serving", "the first frame")
    assert (page.text("#theme-name"), background()) == ("light", light)
    page.resize(1400, 1000, "light")
    page.one("#theme").click()
    assert (page.text("#theme-name"), background()) == ("dark", dark)
    page.one("#theme").click()
    assert (page.text("#theme-name"), background()) == ("system", light)


def test_a_narrow_screen_shows_all_of_it_without_scrolling_sideways(page: Page, client: tq.Client) -> None:
    client.put(LONG, {"x": np.zeros(3)})
    client.get_meta(partition_id=LONG, task_name="reward-" * 12, data_fields=["x"], batch_size=1)
    page.wait(lambda: "1 / 3" in page.row("reward-"), "the task")
    for width in (320, 400, 800, 1000, 1400, 2200):
        page.resize(width, 800)
        page.script("document.querySelectorAll('.more[aria-expanded=false]').forEach((node) => node.click())")
        assert page.script("return document.documentElement.scrollWidth - innerWidth") <= 0, width
        wide = "return [...document.querySelectorAll('.row .name, .row .right, .value, .facts')].filter((node) => "
        assert page.script(wide + "node.scrollWidth > node.clientWidth + 1).length") == 0, width


def test_a_restart_of_the_service_is_survived_and_told_apart_from_an_outage(
    page: Page, client: tq.Client, service: ServiceProcess
) -> None:
    client.put("train@0", {"x": np.zeros(5)})
    page.wait(lambda: "5" in page.row("train@0"), "5 samples")
    assert not page.one("#banner").is_displayed()
    service.kill()
    page.wait(lambda: "is unreachable" in page.text("#banner-title"), "the banner")
    banner = page.one("#banner").text
    assert service.address in banner and re.search(r"since \d\d:\d\d:\d\d", banner)
    assert page.one("#banner").get_attribute("role") == "alert"
    assert "5" in page.row("train@0")  # the last state stays
    assert page.browser.title.startswith("unreachable")
    service.start()
    page.wait(lambda: page.text("#state-text") == "serving" and not page.one("#banner").is_displayed(), "it is back")
    assert "5" in page.row("train@0")
    events = page.text("#events")
    assert "is unreachable" in events and "is back after" in events and "was restarted with 1 partition" in events
    client.put("train@0", {"x": np.zeros(2)})
    page.wait(lambda: "7" in page.row("train@0"), "it follows on")


def test_how_far_producers_are_ahead_is_seen(page: Page, client: tq.Client) -> None:
    client.create_partition("train", admissions=[tq.Admission("update", 4, given_back="published")], tasks=["update"])
    client.put("train", {"x": np.zeros(3)}, custom_meta=[{"version": version} for version in (5, 6, 8)])
    page.wait(lambda: "3 of 4 samples outstanding" in page.text("#limits"), "the limit")
    assert "until published" in page.text("#limits")
    assert "oldest version 5, producers 3 ahead" in page.row("update")


def test_the_claims_that_hold_leases_are_in_the_details(page: Page, client: tq.Client) -> None:
    client.put("train", {"x": np.zeros(30)})
    for number in range(22):
        client.get_meta(
            partition_id="train", task_name="t", data_fields=["x"], batch_size=1, lease=600.0, claim_name=f"w{number}"
        )
    page.wait(lambda: page.texts(".more"), "the partition")
    page.one(".more").click()
    page.wait(lambda: "w19: 1 for " in page.text(".details") and "2 more claims" in page.text(".details"), "leases")
    assert "w20" not in page.text(".details")


def test_where_the_time_of_steps_goes_is_seen(page: Page, client: tq.Client) -> None:
    client.put("train@0", {"x": np.zeros(2)})
    timer = tq.StepTimer()
    with timer.step():
        pass
    assert not page.one("#steps-panel").is_displayed()
    with timer.step():
        client.get_meta(
            partition_id="train@0", task_name="t", data_fields=["x"], batch_size=2, batch_index=0, dp_rank=0, dp_size=1
        )
    page.wait(lambda: "t of train" in page.text("#steps"), "the task")
    assert "1 rank" in page.text("#steps")


def test_what_a_partition_has_released_is_in_the_details(page: Page, client: tq.Client) -> None:
    client.create_partition("train", release=tq.Release("saved", ["actor"], 90.0))
    client.put("train", {"x": np.zeros(2)})
    client.fail_samples("train", global_indexes=[1])
    page.wait(lambda: page.texts(".more"), "the partition")
    page.one(".more").click()
    page.wait(lambda: "saved by actor, released" in page.text(".details"), "the rule")
    assert "90 s old, released" in page.text(".details")


def test_mirrors_are_in_the_storage_section_where_there_are_any(browser: Any, loop_thread: LoopThread) -> None:
    client, page = FakeClient(), Page(browser)
    serving = running_page(client, interval_seconds=0.1)
    url = loop_thread.run(serving.__aenter__())
    try:
        page.resize(1400, 1000)
        browser.get(f"{url}/")
        page.wait(lambda: page.text("#state-text") == "serving", "the first frame")
        lines = "return [...document.querySelectorAll('#storages .mirror')].filter((node) => node.offsetParent).map"
        assert page.script(f"{lines}((node) => node.textContent)") == []
        client.answer = status(storages=mirrored())
        page.wait(lambda: len(page.texts("#storages li")) == 4, "four storage services")
        assert page.script(f"{lines}((node) => node.textContent)") == [
            "mirror s3://bucket/prefix does not answer · 3.4 MB unmirrored",
            "mirror s3://bucket/prefix not contacted yet · 0 bytes unmirrored · 2 puts not fetched yet",
            "mirror s3://bucket/prefix answers · 0 bytes unmirrored · 1,234 puts with fewer copies than requested",
        ]
        assert page.texts("#storages .adopted .pair span") == ["s0", "taken over by s1"]
        assert page.script("return document.querySelector('.adopted .bar').offsetParent") is None
        assert page.text("#tiles article:nth-child(4) .note") == "10.0 % of the quota"  # of three, not of four
        colors = []
        for scheme in ("light", "dark"):
            page.resize(320, 800, scheme)
            assert page.script("return document.documentElement.scrollWidth - innerWidth") <= 0
            wide = "return [...document.querySelectorAll('#storages .mirror, #storages .pair span')].filter((node) => "
            assert page.script(wide + "node.scrollWidth > node.clientWidth + 1 && node.clientWidth).length") == 0
            colors += page.script(f"{lines}((node) => getComputedStyle(node).color)")
        assert len(set(colors)) == 6  # bad, soft and warn, in light and dark
        client.answer = status(storages=(storage(mirror=mirror()),))
        page.wait(lambda: page.script(f"{lines}((node) => node.className)") == ["mirror soft"], "it is well again")
        assert browser.get_log("browser") == []
    finally:
        browser.get("about:blank")
        loop_thread.run(serving.__aexit__(None, None, None))
