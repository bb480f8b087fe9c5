"""Makes the pictures of the terminal, the portal and the console in docs/images, from the demo.

Run by ``make screenshots``. The rule: a picture shows the demo as it starts, after one message in the playground. The terminal has what the
demo has printed there.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from tests.support.chromium import Chromium, chromium
from tests.support.process import PROGRAM, stop

IMAGES = Path(__file__).resolve().parent / "images"
SEND = "document.getElementById('prompt').value = 'What does a gateway do?'; document.getElementById('composer').requestSubmit()"
COLUMNS = 100
TERMINAL = """<!doctype html><meta charset="utf-8"><title>make run</title>
<style>
  body {{ margin: 0; padding: 24px; background: #8a93a6; display: inline-block; }}
  div {{ padding: 14px 22px 22px; border-radius: 10px; background: {background}; color: {foreground}; box-shadow: 0 8px 24px #0006; }}
  p {{ margin: 0 0 12px; text-align: center; font: 13px sans-serif; opacity: .7; }}
  pre {{ margin: 0; width: 100ch; font: 14px/1.5 monospace; white-space: pre-wrap; word-break: break-all; }}
</style>
<div><p>make run</p><pre>{code}</pre></div>"""
"""A page for the output on a terminal with ``COLUMNS``, as rich fills it in."""


def main() -> None:
    """Run the demo and take the pictures."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, COLUMNS))
    with tempfile.TemporaryDirectory() as folder, open(master, "rb", buffering=0) as terminal:
        demo = subprocess.Popen([str(PROGRAM), "demo"], stdin=slave, stdout=slave, stderr=slave, cwd=folder)
        os.close(slave)
        try:
            printed = b""
            while b"curl" not in printed or not printed.endswith(b"\n"):
                printed += terminal.read(65536)
            (portal, key), (console, token) = re.findall(r"open (\S+)#key=(\S+)", printed.decode())
            with chromium(Path(folder)) as browser:
                terminal_image(browser, Path(folder) / "terminal.html", printed.decode())
                browser.resize(1280, 800)
                opened(browser, f"{portal}/playground?model=demo/qwen3#key={key}", "document.querySelector('.column')")
                browser.evaluate(SEND)
                browser.wait("document.querySelector('.figures') && document.getElementById('left').textContent")
                browser.screenshot(IMAGES / "portal.png")
                opened(browser, f"{console}/keys#key={token}", "!document.getElementById('page').innerText.includes('Loading')")
                browser.resize(1280, browser.evaluate("document.documentElement.scrollHeight"))
                browser.screenshot(IMAGES / "console.png")
        finally:
            stop(demo)


def terminal_image(browser: Chromium, page: Path, printed: str) -> None:
    """Write what was printed, with its colors, to a page, and take a picture of it."""
    console = Console(record=True, width=len(printed), file=io.StringIO())
    console.print(Text.from_ansi(printed.replace("\r\n", "\n").strip()), end="")
    page.write_text(console.export_html(theme=SVG_EXPORT_THEME, inline_styles=True, code_format=TERMINAL))
    browser.open(page.as_uri())
    browser.wait("document.querySelector('pre')")
    browser.resize(browser.evaluate("Math.ceil(document.body.getBoundingClientRect().width)"), 100)
    browser.screenshot(IMAGES / "terminal.png")


def opened(browser: Chromium, url: str, condition: str) -> None:
    """Open a page and wait for its content."""
    browser.open("about:blank")
    browser.open(url)
    browser.wait(f"document.getElementById('page').hidden === false && {condition}")


if __name__ == "__main__":
    main()
