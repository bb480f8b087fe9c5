"""The metrics show the kernel's figures for the worker processes while those processes exist."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

from gateway.telemetry.metrics import FAMILIES
from gateway.worker.process_metrics import process_series
from gateway.worker.supervisor import WorkerStatus
from tests.support.process import configuration, gateway, launched, wait_for


def worker(number: int, pid: int | None) -> WorkerStatus:
    return WorkerStatus(number, pid, up=True, version=1, restarts=0, unanswered=0)


def test_each_worker_with_a_process_has_its_series() -> None:
    shown = {(series.family, series.labels): value for series, value in process_series([worker(0, os.getpid()), worker(1, None)])}
    assert {family for family, _ in shown} <= set(FAMILIES) and {labels for _, labels in shown} == {("0",)}
    assert shown["worker_resident_memory_bytes", ("0",)] > 1_000_000
    assert shown["worker_cpu_seconds_total", ("0",)] > 0
    assert 0 < shown["worker_open_fds", ("0",)] <= shown["worker_max_fds", ("0",)]


def test_an_exited_process_has_no_series() -> None:
    exited = subprocess.Popen(["true"])
    exited.wait()
    assert list(process_series([worker(0, exited.pid)])) == []


def test_workers_show_cpu_memory_descriptors_and_the_lag_of_their_loop(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched(), workers=2)) as one:
        counts = [f'vllm_gateway_worker_event_loop_lag_seconds_count{{worker="{number}"}}' for number in (0, 1)]
        wait_for(lambda: all(one.metric(count) > 0 for count in counts))
        for number in (0, 1):
            for family in ("worker_cpu_seconds_total", "worker_resident_memory_bytes", "worker_open_fds", "worker_max_fds"):
                assert one.metric(f'vllm_gateway_{family}{{worker="{number}"}}') > 0
        stalled = psutil.Process(one.workers()[1])
        lag_sum = 'vllm_gateway_worker_event_loop_lag_seconds_sum{worker="1"}'
        before, began = one.metric(lag_sum), time.monotonic()
        stalled.send_signal(signal.SIGSTOP)
        wait_for(lambda: time.monotonic() > began + 2)
        stalled.send_signal(signal.SIGCONT)
        wait_for(lambda: one.metric(lag_sum) > before + 1)
