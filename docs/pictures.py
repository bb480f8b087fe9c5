"""Makes the pictures of the dashboards in docs/images: a gateway with simulators, a Prometheus that watches it, and traffic.

Run by ``make pictures``, with the interpreter that draws (docs/draw.py; it has matplotlib) as its argument. The rule: a picture
shows what Prometheus answered to the panels' own queries, and nothing else.
"""

from __future__ import annotations

import json
import math
import random
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.process import gateway, wait_for
from tests.support.prometheus import Prometheus, prometheus
from tests.support.traffic import MODEL, ON_DEMAND, Traffic, everything, running_servers

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
SECONDS = 150.0
STEP = 2.0
_WORKERS = 12


def main(painter: str) -> None:
    """Run it all and draw."""
    dashboards = runpy.run_path(str(ROOT / "deploy" / "grafana" / "build.py"))["DASHBOARDS"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = everything()
        config["models"][1]["launch"]["args"]["sim-healthy-after"] = 12  # so that a queue is to be seen
        with gateway(folder, config, seconds=60) as one, prometheus(folder, one) as watching:
            traffic = Traffic(one)
            wait_for(lambda: len(watching.targets()) == 1 + running_servers(one), 60)
            start = time.time()
            with under_load(traffic):
                while time.time() - start < SECONDS:
                    traffic.round()
                    time.sleep(random.uniform(1, 4))
            data = {Path(file).stem: drawn(watching, dashboard, start, time.time()) for file, dashboard in dashboards.items()}
        (folder / "data.json").write_text(json.dumps(data))
        IMAGES.mkdir(exist_ok=True)
        subprocess.run([painter, ROOT / "docs" / "draw.py", folder / "data.json", IMAGES], check=True)


@contextmanager
def under_load(traffic: Traffic) -> Iterator[None]:
    """Send requests from a changing number of simulated users."""
    finished, began = threading.Event(), time.monotonic()

    def send_requests(number: int) -> None:
        while not finished.is_set():
            awake = (time.monotonic() - began) % 75 / 75 * _WORKERS
            if number > awake:
                finished.wait(1)
                continue
            tokens, speed = random.randint(20, 120), random.uniform(20, 120)
            simulate = {"tokens": tokens, "tokens_per_second": speed, "time_to_first_token": random.expovariate(8)}
            messages = [{"role": "user", "content": "Tell me more of this. " * random.randint(1, 40)}]
            traffic.request(model=random.choice((MODEL, MODEL, ON_DEMAND)), stream=True, messages=messages, simulate=simulate)
            finished.wait(random.uniform(0, 1))

    with ThreadPoolExecutor(_WORKERS) as users:
        for number in range(_WORKERS):
            users.submit(send_requests, number)
        try:
            yield
        finally:
            finished.set()


def drawn(watching: Prometheus, dashboard: Any, start: float, end: float) -> dict[str, Any]:
    """Return a dashboard with its panels' lines."""
    panels = [
        {
            "title": panel.title,
            "unit": panel.unit,
            "stat": panel.stat,
            "lines": [line for query, legend in panel.queries for line in _lines(watching, query, legend, start, end)],
        }
        for panel in dashboard.panels
    ]
    return {"title": dashboard.title, "start": start, "panels": panels}


def _lines(watching: Prometheus, query: str, legend: str, start: float, end: float) -> Iterator[dict[str, Any]]:
    expanded = re.sub(r"\$\w+", ".*", query.replace("$__rate_interval", "15s"))
    for series in watching.range(expanded, start, end, STEP):
        name = _named(legend, series["metric"])
        values = [(float(at), float(value)) for at, value in series["values"] if math.isfinite(float(value))]
        if values:
            yield {"name": name, "values": values}


def _named(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)


if __name__ == "__main__":
    main(sys.argv[1])
