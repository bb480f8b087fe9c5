"""The demo, as a newcomer sees it."""

from __future__ import annotations

import re
import signal
import subprocess

import httpx2

from tests.support.process import PROGRAM


def test_the_demo_says_that_its_text_is_made_up_and_where_the_status_page_is() -> None:
    with subprocess.Popen([PROGRAM, "demo"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as demo:
        try:
            assert demo.stdout is not None
            printed = []
            for line in demo.stdout:
                printed.append(line)
                if line.startswith("Press Ctrl-C"):
                    break
            text = "".join(printed)
            assert "The model is simulated: the text of its responses is made up." in text
            [page] = re.findall(r"^Status page: (http://127\.0\.0\.1:\d+/status)$", text, re.MULTILINE)
            assert "<title>" in httpx2.get(page, headers={"accept": "text/html"}, timeout=60).text
        finally:
            demo.send_signal(signal.SIGINT)
