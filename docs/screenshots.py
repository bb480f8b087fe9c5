"""Makes the pictures of the portal and the console in docs/images, from the demo.

Run by ``make screenshots``. The rule: a picture shows the demo as it starts, after one message in the playground.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from tests.support.chromium import Chromium, chromium
from tests.support.process import PROGRAM, stop, wait_for

IMAGES = Path(__file__).resolve().parent / "images"
SEND = "document.getElementById('prompt').value = 'What does a gateway do?'; document.getElementById('composer').requestSubmit()"


def main() -> None:
    """Run the demo and take the pictures."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "terminal", "w+") as terminal:
        demo = subprocess.Popen([str(PROGRAM), "demo"], stdout=terminal, stderr=subprocess.DEVNULL)
        try:
            printed = wait_for(lambda: re.findall(r"open (\S+)#key=(\S+)", Path(terminal.name).read_text()), 60)
            (portal, key), (console, token) = printed
            with chromium(Path(folder)) as browser:
                browser.resize(1280, 800)
                opened(browser, f"{portal}/playground?model=demo/qwen3#key={key}", "document.querySelector('.column')")
                browser.evaluate(SEND)
                browser.wait("document.querySelector('.figures') && document.getElementById('left').textContent")
                browser.screenshot(IMAGES / "portal.png")
                opened(browser, f"{console}/keys#key={token}", "!document.getElementById('page').innerText.includes('Loading')")
                browser.screenshot(IMAGES / "console.png")
        finally:
            stop(demo)


def opened(browser: Chromium, url: str, condition: str) -> None:
    """Open a page and wait for its content."""
    browser.open("about:blank")
    browser.open(url)
    browser.wait(f"document.getElementById('page').hidden === false && {condition}")


if __name__ == "__main__":
    main()
