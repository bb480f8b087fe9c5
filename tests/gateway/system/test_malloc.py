"""Memory of large bodies is reused for the next body."""

from __future__ import annotations

import subprocess
import sys

FAULTS = """
import resource, sys
from gateway.system.malloc import keep_what_is_freed
if sys.argv[1] == "kept":
    keep_what_is_freed()
def handle():
    body = bytearray(1 << 20)
    return len([bytes(body) for _ in range(4)])
for _ in range(5):
    handle()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    handle()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    completed = subprocess.run([sys.executable, "-c", FAULTS, how], check=True, capture_output=True, text=True, timeout=60)
    return int(completed.stdout)


def test_memory_of_large_bodies_is_reused() -> None:
    assert page_faults("kept") < 500 < page_faults("given back"), "pages of five megabytes, twenty times, are more than 20,000"
