"""The alerts of ``deploy/prometheus/rules.yaml`` that control can compute from its own state and its last hour. Pure.

The rule: a condition means the same as the expression of the alert with its name, so that the console and Prometheus agree. A test compares
names, severities and durations. The alerts that need a longer history, or a gateway that does not run, are left to Prometheus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from gateway.control.recent_history import HOUR, MinuteCounts
from gateway.control.starvation import Unserved
from gateway.telemetry.metrics import Series

_MOST = 50  # alerts of one rule, for a budget that thousands of keys have nearly used
_WEEK = 7 * 86400.0
_QUARTER = 900.0
_BURN = 14.4
_PROVIDERS = ("identity_provider", "certificate")  # these have separate alerts


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of all alerts: the single values of control's series at ``now``, in seconds since the epoch, and the last hour.

    ``unserved``: the keys that wait for a model that serves only others.
    """

    now: float
    values: Mapping[Series, float]
    counts: MinuteCounts
    unserved: Sequence[Unserved] = ()

    def of(self, family: str) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield the series of a family: labels and value."""
        yield from ((each.labels, value) for each, value in self.values.items() if each.family == family)


Holding = Iterator[tuple[str, str]]
"""The subjects for which a condition holds, each with a sentence."""


@dataclass(frozen=True, slots=True)
class Rule:
    """An alert. It fires once ``found`` has yielded a subject for ``hold`` seconds. ``page`` is the page of the console that helps."""

    severity: str
    hold: float
    page: str
    found: Callable[[Facts], Holding]


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition that holds. ``since`` and ``fires`` are in seconds since the epoch."""

    name: str
    severity: str
    subject: str
    summary: str
    since: float
    fires: float
    page: str


class Alerts:
    """The conditions that hold, with the times since when."""

    def __init__(self, rules: Mapping[str, Rule] | None = None) -> None:
        self._rules = RULES if rules is None else rules
        self._since: dict[tuple[str, str], float] = {}

    def evaluated(self, facts: Facts) -> list[Alert]:
        """Return the alerts that fire, and those that will fire if their condition lasts: the critical and oldest ones first."""
        found = []
        for name, rule in self._rules.items():
            for subject, summary in islice(rule.found(facts), _MOST):
                since = self._since.get((name, subject), facts.now)
                found.append(Alert(name, rule.severity, subject, summary, since, since + rule.hold, rule.page))
        self._since = {(each.name, each.subject): each.since for each in found}
        return sorted(found, key=lambda each: (each.fires > facts.now, each.severity, each.since))


def _no_healthy_server(facts: Facts) -> Holding:
    stopped = {model: 1.0 for (model, _), _ in facts.of("server_out_of_rotation")}
    for (model, _), value in facts.of("server_out_of_rotation"):
        stopped[model] = min(stopped[model], value)
    for (model,), ready in facts.of("ready_servers"):
        if not ready and not stopped.get(model):
            yield model, f"No server of {model} is ready."


def _burning(counter: str, of: str, objective: float, sentence: str) -> Callable[[Facts], Holding]:
    def found(facts: Facts) -> Holding:
        long, short = ((facts.counts.increase(counter, seconds), facts.counts.increase(of, seconds)) for seconds in (HOUR, HOUR / 12))
        for model, bad in long[0].items():
            shares = [window[0].get(model, 0.0) / (window[1].get(model) or 1.0) for window in (long, short)]
            if bad >= 10 and min(shares) > _BURN * objective:
                yield model, sentence.format(model=model, bad=round(bad), of=round(long[1].get(model, 0.0)))

    return found


def _restarts(counter: str, sentence: str) -> Callable[[Facts], Holding]:
    def found(facts: Facts) -> Holding:
        for label, number in facts.counts.increase(counter, _QUARTER).items():
            if number > 2:
                yield label, sentence.format(label=label, number=round(number))

    return found


def _reload_failed(facts: Facts) -> Holding:
    yield from (("", "The last change of the configuration was rejected.") for _, ok in facts.of("config_last_reload_successful") if not ok)


def _dependency_down(facts: Facts) -> Holding:
    for (name,), up in facts.of("dependency_up"):
        if not up and name not in _PROVIDERS:
            yield name, f"{name} is down."


def _ledger_in_memory(facts: Facts) -> Holding:
    rows = sum(value for _, value in facts.of("ledger_memory_rows"))
    if rows and any(not up for (name,), up in facts.of("dependency_up") if name in ("ledger_database", "ledger_spool")):
        yield "", f"{rows:.0f} rows of the ledger are in memory only."


def _ledger_loses(facts: Facts) -> Holding:
    lost = facts.counts.increase("ledger_dropped", _QUARTER).get("", 0.0)
    if lost > 0:
        yield "", f"{lost:.0f} rows of the ledger were lost."


def _direct_use(facts: Facts) -> Holding:
    for model, tokens in facts.counts.increase("direct_use", HOUR).items():
        if tokens > 1000:
            yield model, f"Requests reach the servers of {model} without the gateway: {tokens:.0f} tokens within an hour."


def _key_expires(facts: Facts) -> Holding:
    for (key,), at in facts.of("key_expires_timestamp_seconds"):
        if 0 < at - facts.now < _WEEK:
            yield key, f"The key {key} expires in {_days(at - facts.now)}."


def _certificate_expires(facts: Facts) -> Holding:
    for (setting,), at in facts.of("certificate_expires_timestamp_seconds"):
        if at - facts.now < _WEEK:
            left = at - facts.now
            yield setting, f"The certificate of {setting} {'has expired' if left <= 0 else f'expires in {_days(left)}'}."


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.0f} days" if seconds > 2 * 86400 else f"{seconds / 3600:.0f} hours"


def _wrong_model(facts: Facts) -> Holding:
    yield from ((server, f"{server} does not serve {model}.") for (model, server), serves in facts.of("server_serves_model") if not serves)


def _key_set_down(facts: Facts) -> Holding:
    yield from ((issuer, f"The keys of {issuer} cannot be fetched.") for (issuer,), up in facts.of("key_set_up") if not up)


def _budget(least: float, soft: str, sentence: str) -> Callable[[Facts], Holding]:
    def found(facts: Facts) -> Holding:
        for (holder, budget, is_soft), share in facts.of("budget_used_ratio"):
            if is_soft == soft and (share >= least if soft == "false" else share > least):
                yield f"{holder} {budget}", sentence.format(holder=holder, budget=budget, share=share)

    return found


def _notices_wait(facts: Facts) -> Holding:
    for (notice,), seconds in facts.of("notices_oldest_waiting_seconds"):
        if seconds > _QUARTER:
            yield notice, f"Notices of {notice} have waited for {seconds / 60:.0f} minutes."


def _continuations_fail(facts: Facts) -> Holding:
    all_of = facts.counts.increase("continuations", HOUR)
    for model, failed in facts.counts.increase("not_continued", HOUR).items():
        if failed >= 10 and failed > 0.1 * all_of.get(model, 0.0):
            yield model, f"{failed:.0f} of {all_of.get(model, 0.0):.0f} lost streams of {model} could not be continued within an hour."


def _queue_grows(facts: Facts) -> Holding:
    growth = facts.counts.increase("queued", 600)
    for model, queued in facts.counts.present("queued"):
        if queued > 0 and growth.get(model, 0.0) > 0:
            waits = "1 request waits" if round(queued) == 1 else f"{queued:.0f} requests wait"
            yield model, f"The queue of {model} grows: {waits}."


def _starvation(facts: Facts) -> Holding:
    for each in facts.unserved:
        subject = f"{each.model} {each.class_name} {each.team} {each.key}"
        yield (
            subject,
            f"{each.key} waits for {each.model} and gets no service, while others do: {each.waiting:.0f} requests of {each.class_name}.",
        )


def _auth_failures(facts: Facts) -> Holding:
    before = facts.counts.increase("auth_failures", HOUR - 300, 300)
    for reason, number in facts.counts.increase("auth_failures", 300).items():
        rate = number / 300
        if rate > 1 and rate > 5 * before.get(reason, 0.0) / (HOUR - 300):
            yield reason, f"{rate:.0f} requests a second are rejected for their key ({reason})."


_MODELS, _QUEUE, _KEYS, _SYSTEM = "/console/models", "/console/queue", "/console/keys", "/console/system"
_REQUESTS = "/console/requests?status=failed"
_FAILED = "{bad} of {of} requests of {model} failed within an hour."
_STARTED_LATE = "{bad} of {of} streams of {model} started late within an hour."
_USED, _EXCEEDED = "{holder} has used {share:.0%} of {budget}.", "{holder} has exceeded its soft budget {budget}: {share:.0%}."
RULES: Mapping[str, Rule] = {
    "VllmGatewayNoHealthyServer": Rule("critical", 300, _MODELS, _no_healthy_server),
    "VllmGatewayFailuresFast": Rule("critical", 120, _REQUESTS, _burning("failures", "requests", 0.001, _FAILED)),
    "VllmGatewayFirstTokensFast": Rule("critical", 120, _MODELS, _burning("late", "streams", 0.05, _STARTED_LATE)),
    "VllmGatewayServerCrashLoop": Rule(
        "critical", 60, _MODELS, _restarts("server_restarts", "{label} was restarted {number} times in 15 minutes.")
    ),
    "VllmGatewayWorkerCrashLoop": Rule(
        "critical", 60, _SYSTEM, _restarts("worker_restarts", "{number} workers ended unexpectedly in 15 minutes.")
    ),
    "VllmGatewayReloadFailed": Rule("warning", 60, "/console/configuration", _reload_failed),
    "VllmGatewayDependencyDown": Rule("warning", 300, _SYSTEM, _dependency_down),
    "VllmGatewayLedgerInMemory": Rule("critical", 60, _SYSTEM, _ledger_in_memory),
    "VllmGatewayLedgerLoses": Rule("critical", 0, _SYSTEM, _ledger_loses),
    "VllmGatewayDirectUse": Rule("warning", 0, "/console/usage", _direct_use),
    "VllmGatewayKeyExpires": Rule("warning", 3600, _KEYS, _key_expires),
    "VllmGatewayCertificateExpires": Rule("warning", 3600, _SYSTEM, _certificate_expires),
    "VllmGatewayWrongModel": Rule("warning", 300, _MODELS, _wrong_model),
    "VllmGatewayKeySetAway": Rule("warning", 900, _SYSTEM, _key_set_down),
    "VllmGatewayBudgetNearlyUsed": Rule("warning", 300, _KEYS, _budget(0.9, "false", _USED)),
    "VllmGatewaySoftBudgetExceeded": Rule("warning", 300, _KEYS, _budget(1.0, "true", _EXCEEDED)),
    "VllmGatewayNoticesWait": Rule("warning", 0, _SYSTEM, _notices_wait),
    "VllmGatewayContinuationsFail": Rule("warning", 0, _MODELS, _continuations_fail),
    "VllmGatewayQueueGrows": Rule("warning", 300, _QUEUE, _queue_grows),
    "VllmGatewayStarvation": Rule("warning", 180, "/console/queue?show=waiting", _starvation),
    "VllmGatewayAuthFailures": Rule("warning", 300, "/console/requests", _auth_failures),
}
"""The alerts by name."""
