"""The count of usable CPUs: affinity and quotas of cgroups."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.system.cpus import quota, usable_cpus

AFFINITY = len(os.sched_getaffinity(0))


def groups(folder: Path, path: str, **quotas: str) -> tuple[Path, Path]:
    """Make a tree of groups and a process in the group at `path`. A quota's name is the path of its group, with _ for /."""
    root = folder / "cgroup"
    root.mkdir()
    for name, text in quotas.items():
        group = root / name.replace("_", "/").removeprefix("root")
        group.mkdir(parents=True, exist_ok=True)
        (group / "cpu.max").write_text(text)
    membership = folder / "membership"
    membership.write_text(f"0::{path}\n")
    return root, membership


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000\n", math.inf), ("200000 100000\n", 2.0), ("150000 100000\n", 1.5), ("5000 10000\n", 0.5), ("-1\n 100000\n", math.inf)],
)
def test_a_quota_is_a_number_of_cpus(text: str, expected: float) -> None:
    assert quota(text) == expected


def test_without_a_quota_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cpus(*groups(tmp_path, "/a/b", a="max 100000")) == AFFINITY
    assert usable_cpus(tmp_path / "none", tmp_path / "none") == AFFINITY


def test_an_affinity_of_one_cpu_is_one() -> None:
    program = "from gateway.system.cpus import usable_cpus; print(usable_cpus())"
    pinned = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), sys.executable, "-c", program]
    assert subprocess.run(pinned, capture_output=True, text=True, check=True).stdout == "1\n"


def test_the_quota_of_a_containing_group_counts(tmp_path: Path) -> None:
    assert usable_cpus(*groups(tmp_path, "/a/b", root="max 100000", a="100000 100000", a_b="max 100000")) == 1


def test_a_container_sees_its_quota_at_the_root(tmp_path: Path) -> None:
    assert usable_cpus(*groups(tmp_path, "/", root="100000 100000")) == 1


@pytest.mark.parametrize(("most", "expected"), [("100000", 1), ("-1", AFFINITY)])
@pytest.mark.parametrize("path", ["/a/b", "/elsewhere/on/the/host"])
def test_quotas_of_version_1_count(tmp_path: Path, path: str, most: str, expected: int) -> None:
    (tmp_path / "membership").write_text(f"4:memory:/\n2:cpuacct:/\n1:cpu,other:{path}\n0::/\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{most}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cpus(tmp_path, tmp_path / "membership") == expected


@pytest.mark.parametrize(("text", "expected"), [("50000 100000", 1), ("199000 100000", 1), ("99900000 100000", AFFINITY)])
def test_the_count_is_whole_and_at_least_one(tmp_path: Path, text: str, expected: int) -> None:
    assert usable_cpus(*groups(tmp_path, "/a", a=text)) == expected


@pytest.mark.parametrize("path", ["/../elsewhere", "/gone"])
def test_a_group_that_cannot_be_seen_sets_no_quota(tmp_path: Path, path: str) -> None:
    root, membership = groups(tmp_path, path, root="max 100000")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "cpu.max").write_text("100000 100000")
    assert usable_cpus(root, membership) == AFFINITY


def test_a_malformed_quota_is_ignored(tmp_path: Path) -> None:
    assert usable_cpus(*groups(tmp_path, "/a", a="many")) == AFFINITY
