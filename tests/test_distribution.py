"""The suite's distribution over processes: groups stay together, start by their length, and few of them have a real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.support.distribution import Stopwatch, group_of, grouped, is_real

ROOT = Path(__file__).parents[1]
CONFTEST = """
import json, os, pytest
from pathlib import Path
from tests.support.distribution import pytest_xdist_make_scheduler

@pytest.fixture(scope="module")
def built(request):
    note("built", request.node.name)

@pytest.fixture(autouse=True)
def ran(request, built):
    note("ran", request.node.nodeid)

def note(what, name):
    with Path("notes").open("a") as notes:
        notes.write(json.dumps([what, name, os.getpid()]) + "\\n")
"""
PLAIN = "import pytest\n\n@pytest.mark.parametrize('n', range(6))\ndef test_it(n):\n    pass\n"
SHARED = "import pytest\n\n@pytest.mark.parametrize('server', ['@llama', '@qwen', 'none'])\ndef test_it(server):\n    pass\n"


def test_the_group_of_an_item() -> None:
    assert group_of("tests/gateway/test_x.py::test_it[a-b]") == "tests/gateway/test_x.py"
    assert group_of("tests/gateway/test_x.py::TestIt::test_it") == "tests/gateway/test_x.py"
    assert group_of("tests/vllm/test_x.py::test_it[plain-@qwen]") == "@qwen"
    assert group_of("tests/vllm/test_x.py::test_it[@qwen-plain]") == "@qwen"
    assert group_of("tests/gateway/test_x.py::test_it[user@host]") == "tests/gateway/test_x.py"
    assert is_real("@qwen") and is_real("tests/vllm/test_x.py") and not is_real("tests/gateway/test_x.py")


def test_the_longest_group_is_first_and_keeps_its_order() -> None:
    collection = ["a.py::one", "b.py::one", "a.py::two", "c.py::one[@qwen]", "d.py::one[@qwen]"]
    groups = [(group.name, group.items) for group in grouped(collection, {"a.py": 3, "b.py": 40})]
    assert groups == [("b.py", (1,)), ("@qwen", (3, 4)), ("a.py", (0, 2))]


def test_each_group_runs_in_one_process(tmp_path: Path) -> None:
    """With the pytest and the pytest-xdist that are installed."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in "abc":
        (tmp_path / f"test_plain_{name}.py").write_text(PLAIN)
    for name in "de":
        (tmp_path / f"test_shared_{name}.py").write_text(SHARED)
    command = [sys.executable, "-m", "pytest", "-n", "3", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "24 passed" in done.stdout, done.stdout + done.stderr
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    processes, order = defaultdict(set), defaultdict(list)
    for what, name, pid in notes:
        if what == "ran":
            processes[group_of(name)].add(pid)
            order[group_of(name)].append(name)
    assert len(processes) == 7 and all(len(pids) == 1 for pids in processes.values())
    assert all(names == sorted(names) for names in order.values())
    assert len(set.union(*processes.values())) == 3
    built = [name for what, name, _ in notes if what == "built"]
    assert [built.count(f"test_plain_{name}.py") for name in "abc"] == [1, 1, 1]


def test_what_was_not_run_keeps_its_duration(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_here.py").touch()
    file = folder / "durations.json"
    file.write_text(json.dumps({"tests/test_here.py": 7, "tests/test_gone.py": 7, "@qwen": 7}))
    Stopwatch(file).pytest_sessionfinish()
    assert json.loads(file.read_text()) == {"@qwen": 7, "tests/test_here.py": 7}
