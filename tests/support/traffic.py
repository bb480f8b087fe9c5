"""A gateway whose configuration uses every feature that metrics show, and traffic with every outcome."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from gateway.auth import keys
from tests.support.process import Gateway, configuration, launched, wait_for
from tests.support.running import KEY

LIMITED = "sk-a-limited-test-key"
MODEL, ON_DEMAND, BAD, UNREACHABLE = "sim/one", "sim/rests", "sim/bad", "sim/away"


def everything() -> dict[str, Any]:
    """Return a configuration with all kinds of models, two teams with budgets of tokens and cost, and a ledger.

    The models are up, on demand, failing, with a fallback and a mirror, and a split.
    """
    one = launched(MODEL, **{"enable-prompt-tokens-details": True})
    one["launch"]["replicas"] = 2
    one |= {"balance": "cost", "price": {"prompt": 2000, "completion": 8000}}
    rests = launched(ON_DEMAND)
    rests["launch"]["start"] = "on_demand"
    rests["max_inflight"] = 1
    unreachable = {
        "id": UNREACHABLE,
        "servers": [{"url": "http://127.0.0.1:1"}],
        "fallbacks": [MODEL],
        "mirror": {"to": MODEL, "share": "5%"},
    }
    split = {"id": "sim/split", "split": {MODEL: 9, ON_DEMAND: 1}}
    config = configuration(one, rests, launched(BAD, **{"reasoning-parser": "no_such_parser"}), unreachable, split)
    config["ledger"] = "sqlite:///usage.db"
    expires = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 30 * 86400))
    config["keys"][0] |= {"id": "chat", "expires": expires, "team": "research"}
    limits = {"requests_per_minute": 2, "tokens_per_day": 10**6, "per_user": {"requests_per_minute": 1000}}
    config["keys"].append({"id": "batch", "hash": keys.hash_of(LIMITED), "limits": limits, "team": "support"})
    soft = {"window": "7d", "cost": 0.5, "tokens": 5000, "soft": True}
    config["teams"] = [
        {"id": "research", "limits": {"tokens_per_day": 140000, "cost_per_month": 2000}},
        {"id": "support", "limits": {"budgets": [soft], "tokens_per_month": 5000}},
    ]
    return config


class Traffic:
    """Requests to a running gateway. ``seen``: the statuses of the responses."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.seen: set[int] = set()

    def round(self, speed: float = 200.0) -> None:
        """Send one request of each kind. ``speed`` of the responses is in tokens per second."""
        fast: dict[str, Any] = {"simulate": {"tokens": 30, "tokens_per_second": speed}}
        self.request(**fast)
        self.request(
            **fast, messages=[{"role": "system", "content": "You are a patient assistant. " * 40}, {"role": "user", "content": "Hi"}]
        )
        self.request(stream=True, **fast)
        self.request(path="/v1/completions", prompt="Once", max_tokens=5)
        self.request(token="sk-nobodys")
        self.request(token=None)
        self.request(model="no/such-model")
        self.request(model=BAD)
        self.request(model=UNREACHABLE)
        self.request(simulate={"status": 500})
        self.request(stream=True, simulate={"tokens": 30, "cut_after": 3})
        self.request(stream=True, temperature=0, simulate={"tokens": 30, "cut_after": 3})  # it is lost again on the other server
        self.request(simulate={"cut_before_headers": True})
        for number in range(4):
            self.request(token=LIMITED, user=f"user {number}", simulate={"tokens": 5})
        with ThreadPoolExecutor(3) as threads:
            queued = [threads.submit(self.request, model=ON_DEMAND, **fast) for _ in range(3)]
        assert all(each.exception() is None for each in queued)
        self.disconnect()

    def wake(self) -> None:
        """Send a request for the on-demand model and wait until the model is up."""
        self.request(model=ON_DEMAND)

    def request(self, path: str = "/v1/chat/completions", token: str | None = KEY, **body: Any) -> None:
        prompt = {} if "prompt" in body else {"messages": [{"role": "user", "content": "Hello"}]}
        document: dict[str, Any] = {"model": MODEL, **prompt, **body}
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        try:
            response = httpx2.post(self._gateway.url + path, json=document, headers=headers, timeout=60, verify=False, trust_env=False)
            self.seen.add(response.status_code)
        except httpx2.HTTPError:
            pass  # a truncated response

    def disconnect(self) -> None:
        """Start a long stream and disconnect."""
        line = 'vllm_gateway_incomplete_total{model="sim/one",reason="client"}'
        before = self._gateway.metric(line)
        document = {
            "model": MODEL,
            "stream": True,
            "messages": [{"role": "user", "content": "Hello"}],
            "simulate": {"tokens": 4000, "tokens_per_second": 50},
        }
        headers = {"authorization": f"Bearer {KEY}"}
        url = self._gateway.url + "/v1/chat/completions"
        with httpx2.stream("POST", url, json=document, headers=headers, timeout=60, verify=False, trust_env=False) as response:
            next(response.iter_bytes())
        wait_for(lambda: self._gateway.metric(line) > before)


def running_servers(gateway: Gateway) -> int:
    """Return the number of servers whose own metrics can be scraped."""
    return len(gateway.get("/metrics/targets").json())
