"""Monitoring of a real vLLM: its span is a child of the gateway's span, and it exports the metrics that the dashboards use."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from urllib.parse import quote

import httpx2
import pytest

from tests.support.collector import collector
from tests.support.process import configuration, gateway, wait_for
from tests.support.running import KEY
from tests.vllm.dialogues import user
from tests.vllm.server import NOT_INSTALLED, START_WITHIN, installed, launch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(START_WITHIN + 120),
    pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED),
]
BUILD = runpy.run_path(str(Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "build.py"))
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_its_spans_and_its_metrics(tmp_path: Path) -> None:
    with collector() as collected:
        launched = launch("llama", {"otlp-traces-endpoint": f"{collected.url}/v1/traces"})
        launched["env"] |= {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"}
        config = configuration({"id": "tests/watched", "launch": launched}) | {"tracing": {"endpoint": collected.url}}
        with gateway(tmp_path, config, seconds=START_WITHIN) as one:
            headers = {"authorization": f"Bearer {KEY}", "traceparent": f"00-{TRACE}-{PARENT}-01"}
            body = {"model": "tests/watched", "messages": [user("Say hello.")], "max_tokens": 8, "stream": True}
            response = httpx2.post(f"{one.url}/v1/chat/completions", json=body, headers=headers, timeout=120, verify=False)
            assert response.text.endswith("data: [DONE]\n\n")
            wait_for(lambda: sum(span.trace_id.hex() == TRACE for span in collected.spans) >= 2, 60)
            metrics = one.get(f"/metrics/servers/{quote('tests/watched#0', safe='')}").text
    spans = [span for span in collected.spans if span.trace_id.hex() == TRACE]
    (ours,) = (span for span in spans if span.parent_span_id.hex() == PARENT)
    assert ours.name == "chat tests/watched"
    assert [span.name for span in spans if span.parent_span_id == ours.span_id] == ["llm_request"]
    shown = {line.split("{")[0].split(" ")[0] for line in metrics.splitlines() if not line.startswith("#")}
    queries = (query for dashboard in BUILD["DASHBOARDS"].values() for panel in dashboard.panels for query, _ in panel.queries)
    assert {name for query in queries for name in re.findall(r"vllm:\w+", query)} - shown == set()
