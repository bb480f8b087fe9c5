"""Summarize the verdicts of a run and the reconciliation of its engines, and render the published table. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.accounting.comparison import COMPLETE, LOST, MISSING, REJECTED, Verdict
from tests.accounting.evidence import Tokens
from tests.accounting.months import MonthResult
from tests.accounting.workload import ROUTES
from tests.vllm.dialogues import Json

BEGIN, END = "<!-- begin: made by python -m tests.accounting -->", "<!-- end -->"
"""The markers of the tables in a page."""
CLASSES = ("ledger", "choices", "not_delivered", "cancelled_prefill", "direct_use", "lost", "uncounted", "estimates", "difference")
_COLUMNS = (
    "route",
    "requests",
    "streamed",
    "complete",
    "client disconnected",
    "server killed",
    "worker killed",
    "other",
    "exact rows",
    "estimated by `events`",
    "by `journal`",
    "error of estimated prompts",
    "of estimated completions",
)


@dataclass(frozen=True, slots=True)
class EngineResult:
    """One run of an engine: its counters, and its classes by kind of tokens. ``killed``: it was killed, so its last counts are unknown.

    ``counters`` is None for a killed engine. ``unsampled``: the tokens of rows after its last sample.
    """

    name: str
    killed: bool
    counters: Tokens | None
    prompt: Json
    completion: Json
    unsampled: Tokens

    @property
    def problems(self) -> list[str]:
        """List what is wrong with it. Nothing confirms the classes of a killed engine, but the ledger never has more than the engine."""
        found = []
        for kind, classes in (("prompt", self.prompt), ("completion", self.completion)):
            explained = sum(classes[name] for name in CLASSES)
            counted = classes["engine"] if self.counters is None else getattr(self.counters, kind)
            if classes["difference"] or explained != counted:
                found.append(f"{self.name}: {kind} tokens: the engine has counted {counted}, and the classes are {classes}")
        return found


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run. ``ages``: of the rows of lost streams, in seconds. ``faults``: what happened, as text.

    ``months``: of the rows at the end, half of them in a closed month.
    """

    verdicts: Sequence[Verdict]
    engines: Sequence[EngineResult]
    ages: Sequence[float]
    faults: str
    months: MonthResult

    @property
    def problems(self) -> list[str]:
        """List what is wrong, as text."""
        wrong = [f"{each.exchange.planned}: {each.problem}" for each in self.verdicts if each.problem]
        return [*wrong, *(problem for engine in self.engines for problem in engine.problems), *self.months.problems()]

    def lines(self) -> list[str]:
        """Render the tables in Markdown."""
        disconnected = sum(each.end == "client" for each in self.verdicts)
        wrong = sum(bool(each.problem) for each in self.verdicts)
        lines = [
            f"{len(self.verdicts):,} requests. In {disconnected:,} ({_share(disconnected, len(self.verdicts))}) the client disconnected.",
            f"Faults: {self.faults}. Rows that differ from what was delivered, beyond their stated error: {wrong}.",
            "",
            f"| {' | '.join(_COLUMNS)} |",
            "|" + "---|" * len(_COLUMNS),
        ]
        lines += [self._route(route, [each for each in self.verdicts if each.exchange.planned.path == route]) for route in ROUTES]
        lines += [self._route("all", self.verdicts), "", *self._engine_table(), "", *self.months.lines()]
        if self.ages:
            age = f"{1000 * max(self.ages):,.0f} ms older than the last event that the client received"
            lines += ["", f"The rows of {len(self.ages)} streams whose worker was killed have the counts of their journal, at most {age}."]
        return lines

    def _route(self, name: str, verdicts: Sequence[Verdict]) -> str:
        by_end = Counter(each.end for each in verdicts)
        methods = Counter(each.estimated_by for each in verdicts if each.row is not None)
        shown = (COMPLETE, "client", "upstream", LOST)
        unknown = sum(each.end == LOST and each.estimated_by is None for each in verdicts)
        exact = methods[None] - unknown
        cells = [
            f"`{name}`" if name.startswith("/") else name,
            f"{len(verdicts):,}",
            f"{sum(each.exchange.planned.streamed for each in verdicts):,}",
            *(f"{by_end[end]:,}" for end in shown),
            f"{by_end[REJECTED] + by_end[MISSING]:,}",
            f"{exact:,} ({_share(exact, len(verdicts))})",
            *(f"{methods[method]:,} ({_share(methods[method], len(verdicts))})" for method in ("events", "journal")),
            _errors(verdicts, lambda error: error.prompt),
            _errors(verdicts, lambda error: error.completion),
        ]
        return f"| {' | '.join(cells)} |"

    def _engine_table(self) -> Iterator[str]:
        used = [name for name in CLASSES if any(each.prompt[name] or each.completion[name] for each in self.engines)]
        shown = [*used, *(name for name in ("difference",) if name not in used)]
        yield f"| engine | tokens | engine | {' | '.join(f'`{name}`' for name in shown)} | after its last sample |"
        yield "|" + "---|" * (len(shown) + 4)
        for each in self.engines:
            for kind, classes in (("prompt", each.prompt), ("completion", each.completion)):
                unsampled = f"{getattr(each.unsampled, kind):,}" if each.killed else ""
                cells = [f"{each.name}{', killed' * each.killed}", kind, *(f"{classes[name]:,}" for name in ("engine", *shown)), unsampled]
                yield f"| {' | '.join(cells)} |"


def _share(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.1%}"


def _errors(verdicts: Iterable[Verdict], value: Callable[[Tokens], int]) -> str:
    """Return the range of the errors of estimated rows, without those of lost requests."""
    errors = [value(each.error) for each in verdicts if each.estimated_by is not None and each.end != LOST]
    return f"{min(0, *errors):+d} to {max(0, *errors):+d}" if any(errors) else "0"
