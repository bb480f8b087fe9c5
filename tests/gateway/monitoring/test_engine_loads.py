"""Workers share their placements, and the engines' load reaches them: a gateway with two workers and two simulators."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.process import Gateway, configuration, gateway, launched, wait_for

CONTEXT = "You are the assistant of a customer. " * 200


def servers(served: Gateway) -> list[str]:
    """The servers of all requests so far, in their order, by the access log."""
    lines = [json.loads(line) for line in served.log.splitlines() if '"endpoint"' in line]
    return [line["server"] for line in sorted(lines, key=lambda line: line["time"])]


def test_two_workers_route_one_context_to_one_server(tmp_path: Path) -> None:
    model = launched()
    model["launch"]["replicas"] = 2
    model |= {"balance": "cost", "cost_policy": {"explain": True}}
    with gateway(tmp_path, configuration(model, workers=2)) as served:
        for customer in range(4):
            for number in range(6):  # each request has a separate connection, so both workers get some
                system = {"role": "system", "content": f"{customer} {CONTEXT}"}
                response = served.request(messages=[system, {"role": "user", "content": f"{number}"}], max_tokens=2)
                assert response.status_code == 200
        found = wait_for(lambda: len(each := servers(served)) == 24 and each)
        assert [len(set(found[6 * customer : 6 * customer + 6])) for customer in range(4)] == [1, 1, 1, 1]
        choice = wait_for(lambda: served.get("/status").json()["models"][0].get("last_choice"))
        assert choice["server"] in choice["candidates"] and len(choice["candidates"]) == 2
        sizes = [f'vllm_gateway_prefix_index_blocks{{model="sim/one",worker="{number}"}}' for number in (0, 1)]
        wait_for(lambda: all(served.metric(size) for size in sizes))
