"""The report and its charts, from results that are made up."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.benchmarks import report, results
from tests.benchmarks.cases import CASES
from tests.benchmarks.chart import Bar, bars
from tests.benchmarks.results import Section, Spread
from tests.documents.blocks import ROOT

MACHINE = {"CPU": "A CPU", "cores": "2", "kernel": "Linux 6", "Python": "3.11.2"}
SVG = "{http://www.w3.org/2000/svg}"


def section(case: str = "json") -> Section:
    """Two proxies in two variants; the third is absent."""
    made = Section(
        case, "2027-01-02T03:04:05+00:00", 3, 61.4, MACHINE, {"vllm-gateway": "1.0", "nginx": "1.2"}, 0.125, {"envoy": "not installed"}
    )
    for variant in ("64 connections", "1 connection"):
        for proxy, costs in {"vllm-gateway": (40e-6, 50e-6, 42e-6), "nginx": (20e-6, 21e-6, 22e-6)}.items():
            for cost in costs:
                made.row(proxy, variant).add({"cpu": cost, "rate": 20_000}, ())
    made.row("nginx", "1 connection").add({}, ("7 × status",))
    return made


def test_a_table_has_medians_spreads_and_ratios() -> None:
    text = report.document("{{json}}", {"json": section()})
    assert "| vllm-gateway | 42.0 (40.0..50.0) | 20,000 | 1.00 |" in text
    assert "| nginx | 21.0 (20.0..22.0) | 20,000 | 0.50 |" in text


def test_what_was_not_measured_has_no_column() -> None:
    assert "p99" not in report.document("{{json}}", {"json": section()})


def test_results_of_an_earlier_version_have_a_dash() -> None:
    made = Section("json", "2027-01-02", 1, 9, MACHINE, {"vllm-gateway": "1.0", "nginx": "1.2"})
    for proxy in ("vllm-gateway", "nginx"):
        made.row(proxy, "1 connection").add({"p50": 1e-3, "p99": 2e-3}, ())
    text = report.document("{{json}}", {"json": made})
    assert "| proxy | p50, ms | p99, ms | p99.9, ms |" in text and "| vllm-gateway | 1.00 | 2.00 | - |" in text
    made.row("nginx", "1 connection").add({"p999": 3e-3}, ())
    text = report.document("{{json}}", {"json": made})
    assert "| vllm-gateway | 1.00 | 2.00 | - |" in text and "| nginx | 1.00 | 2.00 | 3.00 |" in text


def test_links_have_targets_from_the_template_and_from_the_document() -> None:
    link = re.compile(r"\]\(([^)#:]+\.md)[)#]")
    for template in report.TEMPLATES:
        source = template.read_text()
        assert link.findall(source)
        for text, folder in ((source, template.parent), (report.document(source, {}), ROOT / "docs")):
            assert [target for target in link.findall(text) if not (folder / target).is_file()] == []


@pytest.mark.parametrize("case", [name for name, layout in report.LAYOUTS.items() if any(each.value == "p50" for each in layout.columns)])
def test_every_table_of_latencies_has_their_tails(case: str) -> None:
    assert {"p99", "p999"} <= {column.value for column in report.LAYOUTS[case].columns}


def test_errors_and_absent_results_are_shown() -> None:
    text = report.document("{{json}}", {"json": section()})
    assert "- nginx, 1 connection: 7 × status\n- envoy is not in the tables: not installed" in text


def test_the_stamp_says_on_what() -> None:
    assert report.stamp(section()) == (
        "<sub>2027-01-02; 3 rounds in 61 s, other processes used 12% of the machine; "
        "A CPU, 2 cores, Linux 6, Python 3.11.2; vllm-gateway 1.0, nginx 1.2.</sub>"
    )


def test_the_gateway_alone_is_compared_with_its_first_variant() -> None:
    made = Section("keys", "2027-01-02", 1, 9, MACHINE, {"vllm-gateway": "1.0"})
    made.row("vllm-gateway", "1 key").add({"cpu": 40e-6}, ())
    made.row("vllm-gateway", "1,000 keys").add({"cpu": 60e-6}, ())
    text = report.document("{{keys}}", {"keys": made})
    assert "first = 1" in text and "| 1,000 keys | 60.0 | 1.50 |" in text


def test_a_case_that_was_not_run_says_how_to() -> None:
    assert report.document("a {{json}} z", {}) == "a Not measured yet: `make bench CASES=json`. z"


def test_every_case_has_its_layout_and_its_place() -> None:
    placeholders = [name for template in report.TEMPLATES for name in re.findall(r"\{\{(\w+)\}\}", template.read_text())]
    assert set(CASES) == set(report.LAYOUTS) == set(placeholders) - {"does"}
    assert len(placeholders) == len(set(placeholders))


def test_the_pages_are_made_from_the_stored_results() -> None:
    stored = results.read(ROOT / "docs" / "performance" / "results.json")
    for template in report.TEMPLATES:
        page = ROOT / "docs" / template.name
        assert page.read_text() == report.document(template.read_text(), stored), "run .venv/bin/python -m tests.benchmarks --report"


def test_a_run_replaces_its_own_sections_alone(tmp_path: Path) -> None:
    file = tmp_path / "performance" / "results.json"
    results.write(file, {"json": section(), "keys": section("keys")})
    results.write(file, results.read(file) | {"keys": Section("keys", "later", 1, 1.0, MACHINE, {})})
    stored = results.read(file)
    assert (stored["json"], stored["keys"].finished) == (section(), "later")


def test_the_charts_that_the_document_shows_are_written(tmp_path: Path) -> None:
    report.write(tmp_path, {"json": section()})
    shown = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (tmp_path / "performance.md").read_text())
    assert shown == ["performance/json.svg"]
    assert (tmp_path / shown[0]).exists()


# Charts


def drawn(*medians: float) -> list[ElementTree.Element]:
    text = bars("A <title>", "µs", [Bar(str(value), Spread(value, value * 0.9, value * 1.1), f"{value}") for value in medians])
    return ElementTree.fromstring(text).findall(f"{SVG}rect")


def test_bars_are_in_proportion() -> None:
    first, second = (float(rect.get("width", "0")) for rect in drawn(10, 20))
    assert second == pytest.approx(2 * first, rel=0.01)


def test_a_bar_that_dwarfs_the_others_is_cut() -> None:
    small, large, huge = (float(rect.get("width", "0")) for rect in drawn(10, 20, 9000))
    assert large == pytest.approx(2 * small, rel=0.01)
    assert large < huge < 1.2 * large


def test_only_the_cut_bar_looks_cut() -> None:
    text = bars("t", "µs", [Bar(str(value), Spread(value, value, value), "-") for value in (10, 20, 9000)])
    assert text.count('class="cut"') == 1 and text.count('class="spread"') == 2


def test_a_chart_of_zeros_is_drawn() -> None:
    assert [rect.get("width") for rect in drawn(0, 0)] == ["0.0", "0.0"]
