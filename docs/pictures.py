"""Makes the pictures of the dashboards in docs/images: two gateways with simulators, a Prometheus that watches them, and traffic.

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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.ports import reserved
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
    build = runpy.run_path(str(ROOT / "deploy" / "grafana" / "build.py"))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folders = [Path(name) / each for each in ("a", "b")]
        gateways = []
        for folder in folders:
            folder.mkdir()
            config = everything()
            config["models"][1]["launch"]["args"]["sim-healthy-after"] = 12  # so that a queue is to be seen
            config["server"]["admin"]["port"] = stack.enter_context(reserved())
            gateways.append(stack.enter_context(gateway(folder, config, seconds=60)))
        watching = stack.enter_context(prometheus(folders[0], *gateways))
        traffic = [Traffic(one) for one in gateways]
        wait_for(lambda: len(watching.targets()) == sum(1 + running_servers(one) for one in gateways), 60)
        start, reloaded = time.time(), []
        with under_load(traffic):
            while time.time() - start < SECONDS:
                if not reloaded and time.time() - start > SECONDS / 2:
                    reloaded = [one.command("reload") for one in gateways]
                for each in traffic:
                    each.round()
                time.sleep(random.uniform(4, 8))
        end = time.time()
        data = {Path(file).stem: drawn(build, watching, dashboard, start, end) for file, dashboard in build["DASHBOARDS"].items()}
        (folders[0] / "data.json").write_text(json.dumps(data))
        IMAGES.mkdir(exist_ok=True)
        subprocess.run([painter, ROOT / "docs" / "draw.py", folders[0] / "data.json", IMAGES], check=True)


@contextmanager
def under_load(traffic: list[Traffic]) -> Iterator[None]:
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
            random.choice(traffic).request(
                model=random.choice((MODEL, MODEL, ON_DEMAND)), stream=True, messages=messages, simulate=simulate
            )
            finished.wait(random.uniform(0, 1))

    with ThreadPoolExecutor(_WORKERS) as users:
        for number in range(_WORKERS):
            users.submit(send_requests, number)
        try:
            yield
        finally:
            finished.set()


def drawn(build: Mapping[str, Any], watching: Prometheus, dashboard: Any, start: float, end: float) -> dict[str, Any]:
    """Return a dashboard with its panels' places, colors and series."""
    laid_out = json.loads(build["made"](dashboard))["panels"]
    panels = iter(dashboard.panels)
    drawn = []
    for one in laid_out:
        about = {"kind": one["type"], "title": one["title"], "grid": one["gridPos"]}
        if one["type"] != "row":
            panel = next(panels)
            lines = [line for query, legend in panel.queries for line in _lines(watching, query, legend, start, end)]
            about |= {name: getattr(panel, name) for name in ("unit", "axis", "steps", "floor", "most", "states")}
            about |= {"colors": build["colors_of"](panel), "lines": lines}
        drawn.append(about)
    seconds = round(end - start)
    return {"title": dashboard.title, "start": start, "end": end, "period": f"{seconds} seconds with simulators", "panels": drawn}


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
