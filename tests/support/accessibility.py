"""Check the accessibility of a page in a browser, in each size and color scheme."""

from __future__ import annotations

from itertools import product
from typing import Literal

from tests.support.chromium import Chromium

WIDTHS = (390, 1440)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def audit(browser: Chromium) -> None:
    """Check the page as it is now, for a phone and a desktop, light and dark: axe-core finds no violation, and it is as wide as the window.

    Use it in each state of a page: the entry, empty, with data, with an error, with an open dialog.
    """
    for width, scheme in product(WIDTHS, SCHEMES):
        browser.resize(width, 900)
        browser.prefer(scheme)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, f"the page is wider than {width} pixels"
        found = browser.axe()
        assert not found, f"{width} pixels, {scheme}: {found}"
