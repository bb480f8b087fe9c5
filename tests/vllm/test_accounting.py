"""A small accounting run against the real vLLM: each row is what its client received, also when the engine or a worker is killed."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

import pytest

from tests.accounting.comparison import COMPLETE, LOST, REJECTED
from tests.accounting.engines import LaunchedEngine
from tests.accounting.run import AccountingRun, Phase
from tests.accounting.scenarios import DISCONNECTING, worker_killer
from tests.vllm.gateway import LEDGER, MODEL, Real
from tests.vllm.server import NOT_INSTALLED, installed

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED), pytest.mark.timeout(600)]

_MOST_KILLS = 10
"""A worker that is killed on a busy machine can have sent all of its responses. Then another one is killed."""


def test_each_row_is_what_its_client_received(real: Real) -> None:
    engine = LaunchedEngine(real.gateway, MODEL, real.folder)
    run = AccountingRun(real.gateway, [engine], LEDGER, 8, Random(5), texts=2)
    run.play_references()
    for attempt in range(_MOST_KILLS):
        run.play(Phase(f"worker {attempt}", 0, DISCONNECTING, partial(worker_killer, run)), 70)
        if any(verdict.end == LOST for verdict in run.verdicts):
            break
    run.play(Phase("engine", 0, DISCONNECTING, partial(engine.killer, "EngineCore")), 50)
    assert [verdict.problem for verdict in run.verdicts if verdict.problem] == []
    by_end = Counter(verdict.end for verdict in run.verdicts)
    assert by_end[COMPLETE] and by_end["client"] and by_end[LOST] and by_end["upstream"] + by_end[REJECTED]
