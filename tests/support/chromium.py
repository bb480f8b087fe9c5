"""Control a headless Chromium: open a page, evaluate JavaScript, press keys, take screenshots, check accessibility, and collect errors.

Playwright controls the Chromium of the system, in a separate thread: its synchronous interface runs an event loop, and a test may run
one too. The rule: neither a process nor a thread is left at the end.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
from playwright.sync_api import Dialog, Error, Page, sync_playwright

from tests.clients.install import NODE, installed

SECONDS = 60
AXE = NODE / "node_modules" / "axe-core" / "axe.min.js"
RUN_AXE = """async () => (await axe.run(document, {resultTypes: ["violations"], preload: false})).violations.map((one) => ({
  rule: one.id, impact: one.impact, nodes: one.nodes.map((node) => `${node.target.join(" ")}: ${node.failureSummary}`),
}))"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule of axe-core that a page violates, and the elements that do."""

    rule: str
    impact: str
    nodes: tuple[str, ...]


class Chromium:
    """One page. ``complaints``: messages of the console (blocked by policy, failed to load, uncaught). ``requests``: the requested URLs."""

    def __init__(self, page: Page, thread: ThreadPoolExecutor) -> None:
        self._page = page
        self._thread = thread
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", self._dismiss)
        page.on("request", lambda request: self.requests.append(request.url))

    def _dismiss(self, dialog: Dialog) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, url: str) -> None:
        self._do(lambda: self._page.goto(url, wait_until="commit"))

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or None if it has no value yet."""

        def value() -> Any:
            try:
                return self._page.evaluate(expression)
            except Error:
                return None

        return self._do(value)

    def wait(self, expression: str, seconds: float = SECONDS) -> None:
        """Wait until a JavaScript expression is true. An expression that throws an error is not true yet."""
        condition = f"() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }}"
        try:
            self._do(lambda: self._page.wait_for_function(condition, timeout=1000 * seconds))
        except Error as error:
            raise AssertionError(f"{expression} does not become true: {error}\n{self.complaints}\n{self.text()}") from None

    def text(self) -> str:
        """Return the visible text of the page."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def press(self, key: str) -> None:
        """Press a key or a combination, such as ``Tab``, ``Enter`` or ``Control+K``."""
        self._do(lambda: self._page.keyboard.press(key))

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self._do(lambda: self._page.keyboard.type(text))

    def resize(self, width: int, height: int) -> None:
        self._do(lambda: self._page.set_viewport_size({"width": width, "height": height}))

    def prefer(self, scheme: Literal["light", "dark"]) -> None:
        """Switch to a color scheme."""
        self._do(lambda: self._page.emulate_media(color_scheme=scheme))

    def disconnect(self, *, is_offline: bool) -> None:
        """Take the network away from the page, or give it back."""
        self._do(lambda: self._page.context.set_offline(is_offline))

    def set_cookie(self, url: str, name: str, value: str) -> None:
        """Replace a cookie of the pages of an origin."""
        self._do(lambda: self._page.context.add_cookies([{"url": url, "name": name, "value": value}]))

    def control_clock(self) -> None:
        """Install the clock that ``forward`` moves, for all later pages."""
        self._do(self._page.clock.install)

    def forward(self, seconds: int) -> None:
        """Let time pass in the page, as if its computer had slept."""
        self._do(lambda: self._page.clock.fast_forward(1000 * seconds))

    def screenshot(self, file: Path) -> None:
        """Write an image of the whole page as PNG."""
        self._do(lambda: self._page.screenshot(path=file, full_page=True))

    def axe(self) -> list[Violation]:
        """Return what axe-core finds in the page as it is now. Skip the test if axe-core is not installed."""
        if not installed(NODE / "node_modules", NODE / "package-lock.json"):
            pytest.skip("axe-core is not installed (make clients)")

        def found() -> list[Violation]:
            self._page.evaluate(AXE.read_text(encoding="utf-8"))
            return [Violation(each["rule"], each["impact"], tuple(each["nodes"])) for each in self._page.evaluate(RUN_AXE)]

        return self._do(found)

    def _do(self, act: Callable[[], T]) -> T:
        return self._thread.submit(act).result()


@contextmanager
def chromium(folder: Path) -> Iterator[Chromium]:
    """Run a browser whose home is ``folder``. Skip the test if Chromium is not installed."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed (Debian: chromium)")
    home: dict[str, str | float | bool] = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    with ThreadPoolExecutor(1, "chromium") as thread:
        driver = thread.submit(sync_playwright().start).result()
        try:
            browser = thread.submit(lambda: driver.chromium.launch(executable_path=program, env=home, args=["--disable-gpu"])).result()
            page = thread.submit(lambda: browser.new_page(reduced_motion="reduce")).result()
            yield thread.submit(Chromium, page, thread).result()
        finally:
            thread.submit(driver.stop).result()
