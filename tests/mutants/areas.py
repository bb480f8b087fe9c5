"""The areas whose mutants are tried. Each module with the tests that notice its mutants.

The rule: the tests of a module are the fewest that can notice its mutants, and take two seconds of the processor at most. They run in this
process. Only those of a store start another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.mutants.area import Area, Tested
from tests.mutants.core import CORE

_ALONE = ("--noconftest", "-ptests.conftest")
"""For tests without fixtures: the conftest.py of their folders would import the whole gateway."""


def _some(file: str, *names: str) -> tuple[str, ...]:
    """Return the arguments for some tests of a file."""
    return tuple(f"{file}::{name}" for name in names)


def _without(file: str, *names: str) -> tuple[str, ...]:
    """Return the arguments for all tests of a file but these, which wait longer than a trial should."""
    return (file, *(f"--deselect={file}::{name}" for name in names))


_EJECTION = "tests/upstream/balancing/test_ejection.py"

RETRY = {
    "upstream/balancing/attempt.py": Tested(
        (
            *_ALONE,
            *_without(
                "tests/upstream/balancing/test_attempt.py",
                "test_the_connect_deadline",
                "test_a_server_that_keeps_failing_is_ejected_and_tried_again_later",
            ),
        )
    ),
    "upstream/balancing/retry_budget.py": Tested((*_ALONE, _EJECTION)),
}

EJECTION = {
    "upstream/balancing/ejection.py": Tested((*_ALONE, _EJECTION)),
    "upstream/backoff.py": Tested((*_ALONE, _EJECTION, "tests/upstream/test_backoff.py")),
    "upstream/balancing/server.py": Tested(
        (*_ALONE, "tests/upstream/balancing/test_pool.py", "tests/upstream/balancing/test_attempt.py::test_a_success_resets_the_failures"),
        (
            "Server.condition",
            "Server.is_ejected",
            "Server.available",
            "Server.record_failure",
            "Server.record_success",
            "Server.expire",
            "Server.retire",
        ),
    ),
}

_LIMITS = _without(
    "tests/gateway/limits/test_limits.py",
    "test_a_client_that_waits_for_retry_after_is_admitted",
    "test_a_client_that_disconnects_pays_for_the_received_tokens",
    "test_a_number_in_another_type_reserves_the_same_tokens",
    "test_refusals_by_a_minute_and_by_a_cost",
)
_STORE, _LEASES = "tests/gateway/limits/redis/test_store.py", "tests/gateway/limits/redis/test_leases.py"
_SETTLED_IN_STORE = (
    *_some(
        _STORE,
        "test_tokens_are_settled_in_the_store",
        "test_a_fallback_is_counted_as_itself",
        "test_a_store_that_stops_before_a_fallback_delays_it_by_nothing",
        "test_a_reload_removes_the_store_before_a_fallback",
    ),
    *_some(
        _LEASES,
        "test_a_lease_continues_after_its_requests",
        "test_requests_that_outlive_their_lease_are_settled_by_their_usage",
        "test_usage_beyond_a_lease_is_charged_at_once",
        "test_a_fallback_ends_the_lease_of_the_former_model",
    ),
)
_RELAYED = (
    "tests/gateway/proxy/test_prompt_count.py",
    "--deselect=tests/gateway/proxy/test_prompt_count.py::test_a_server_that_does_not_count_in_time_ends_the_wait",
    *_without("tests/gateway/proxy/test_context.py", "TestSettlements"),
)

SETTLEMENT = {
    "gateway/api/settlement.py": Tested(("tests/gateway/api/test_settlement.py",)),
    "gateway/limits/estimate.py": Tested(("tests/gateway/limits/test_estimate.py",), ("used_amounts", "counts_as_request")),
    "gateway/limits/reservation.py": Tested(
        ("tests/gateway/limits/test_reservation.py", *_LIMITS, *_SETTLED_IN_STORE),
        (
            "Reservation._change_model",
            "Reservation.is_unsettled",
            "Reservation.counts_tokens",
            "Reservation.estimated_prompt",
            "Reservation.settle",
            "Reservation._settle",
        ),
    ),
    "gateway/proxy/response.py": Tested(
        (*_RELAYED, "tests/gateway/proxy/test_response.py"),
        (
            "ResponseRelay.settle",
            "ResponseRelay._delivery",
            "ResponseRelay._settle_limits",
            "ResponseRelay.lacks_prompt",
            "ResponseRelay.is_empty",
            "NoResponse.settle",
            "BodyRelay._needs_estimate",
            "BodyRelay.estimate_prompt",
            "BodyRelay._delivery",
            "BodyRelay.is_empty",
            "EventRelay.estimate_prompt",
            "EventRelay.lacks_prompt",
            "EventRelay.is_empty",
            "EventRelay._has_count",
            "EventRelay._token_events",
            "EventRelay._delivery",
        ),
    ),
    "gateway/proxy/context.py": Tested(
        _RELAYED, ("RequestContext.needs_prompt_count", "RequestContext._settle", "RequestContext._estimated_prompt")
    ),
}

_FOLDER = "tests/gateway/limits"
_DECISION, _WINDOWS = f"{_FOLDER}/test_decision.py", f"{_FOLDER}/test_windows.py"
_EARLIER_USE, _HEADERS, _RESERVATION = f"{_FOLDER}/test_budget_holders.py", f"{_FOLDER}/test_headers.py", f"{_FOLDER}/test_reservation.py"
_SESSIONS = _without(f"{_FOLDER}/test_sessions.py", "test_all_workers_count_a_session_together")

_SHOWN = (
    *_without(f"{_FOLDER}/test_limiter.py", "test_the_used_share_of_each_budget_is_a_metric"),
    f"{_LEASES}::test_shown_limits_are_without_the_lease",
)

LIMITS = {
    "gateway/limits/decision.py": Tested((_DECISION, _HEADERS, *_LIMITS)),
    "gateway/limits/shared_counts.py": Tested(
        (
            f"{_FOLDER}/test_shared_counts.py",
            f"{_FOLDER}/test_subjects.py",
            f"{_FOLDER}/test_user_table.py",
            *_some(f"{_FOLDER}/test_user_limits.py", "test_each_user_of_open_webui_has_the_limits"),
            _DECISION,
            _EARLIER_USE,
            *_SESSIONS,
        )
    ),
    "gateway/limits/windows.py": Tested(
        (_WINDOWS, _DECISION, _EARLIER_USE, _HEADERS, f"{_FOLDER}/test_shared_counts.py::test_the_capacity_of_hard_budgets")
    ),
    "gateway/limits/key_limits.py": Tested(
        (_RESERVATION, f"{_FOLDER}/test_subjects.py", f"{_FOLDER}/test_user_limits.py", *_SESSIONS, *_LIMITS, *_SHOWN, *_SETTLED_IN_STORE)
    ),
    "gateway/limits/end_users.py": Tested((f"{_FOLDER}/test_end_users.py", f"{_FOLDER}/test_user_limits.py")),
    "gateway/limits/user_limits.py": Tested((f"{_FOLDER}/test_user_limits.py", f"{_FOLDER}/test_end_users.py")),
    "gateway/limits/user_table.py": Tested((f"{_FOLDER}/test_user_table.py", f"{_FOLDER}/test_user_limits.py")),
    "gateway/limits/limiter.py": Tested(
        (
            _RESERVATION,
            f"{_FOLDER}/test_subjects.py",
            f"{_FOLDER}/test_user_limits.py",
            *_SESSIONS,
            *_LIMITS,
            *_SHOWN,
            *_SETTLED_IN_STORE,
            *_some(_STORE, "test_limits_are_shown_from_memory_or_not_at_all_without_the_store"),
        )
    ),
    "gateway/limits/reservation.py": Tested(
        (
            _RESERVATION,
            *_LIMITS,
            *_SESSIONS,
            *_SETTLED_IN_STORE,
            *_some(
                _STORE,
                "test_a_store_that_stops_and_starts_again",
                "test_an_exhausted_limit_refuses_before_the_body",
                "test_limits_of_a_model_are_shown_from_memory_without_the_store",
            ),
        ),
        (
            "Reservation.reserve_request",
            "Reservation.holders",
            "Reservation.reserve_tokens",
            "Reservation._now",
            "Reservation._reserve_in_memory",
            "Reservation._reserve_from_lease",
            "Reservation._reserve_in_store",
            "Reservation._apply_result",
            "Reservation._refusal",
        ),
    ),
    "gateway/limits/expected_use.py": Tested((_RESERVATION, *_LIMITS, *_SESSIONS, *_SETTLED_IN_STORE)),
    "gateway/limits/response_headers.py": Tested((_RESERVATION, *_LIMITS, *_SETTLED_IN_STORE)),
    "gateway/limits/states.py": Tested(
        (
            _RESERVATION,
            *_some(
                f"{_FOLDER}/test_states.py",
                "test_a_cost_is_shown_with_all_of_its_digits",
                "test_concurrent_requests_are_shown",
                "test_a_limit_without_known_counts_is_shown_without_use",
                "test_only_the_hard_limit_of_a_raise_is_shown_as_raised",
                "test_the_used_share_of_a_limit",
            ),
        )
    ),
    "gateway/limits/lease.py": Tested((f"{_FOLDER}/test_lease.py", *_SETTLED_IN_STORE)),
}

_CONTINUED, _QUEUES = "tests/gateway/continuation", "tests/gateway/admission"
_FAST = "tests/gateway/proxy/test_fast_path.py"

CONTINUATION = {
    **{
        f"gateway/continuation/{name}.py": Tested((*_ALONE, f"{_CONTINUED}/test_{name}.py"))
        for name in ("plan", "events", "completion", "chat", "record_memory", "token_record", "regeneration")
    },
    "gateway/continuation/sent_text.py": Tested(
        (
            *_ALONE,
            f"{_CONTINUED}/test_sent_text.py",
            f"{_CONTINUED}/test_regeneration.py",
            f"{_FAST}::test_both_paths_record_the_same_texts",
        )
    ),
    "gateway/proxy/token_chunks.py": Tested((*_ALONE, _FAST)),
}

QUEUES = {
    "gateway/admission/bookings.py": Tested((*_ALONE, f"{_QUEUES}/test_bookings.py")),
    "gateway/admission/weighted_tokens.py": Tested((*_ALONE, f"{_QUEUES}/test_weighted_tokens.py", f"{_QUEUES}/test_fair_queue.py")),
    "gateway/admission/fair_queue.py": Tested((*_ALONE, f"{_QUEUES}/test_fair_queue.py", f"{_QUEUES}/test_bookings.py")),
    "gateway/admission/reserved_slots.py": Tested((*_ALONE, f"{_QUEUES}/test_reserved_slots.py")),
    "gateway/admission/preemption.py": Tested(
        _some(
            f"{_QUEUES}/test_preemption.py",
            "test_its_prompt_is_charged_and_its_charge_is_settled_once",
            "test_the_latest_request_is_preempted_and_the_work_on_the_others_is_not_lost",
            "test_a_request_of_the_same_class_is_not_preempted",
            "test_a_class_that_has_aged_is_not_preempted",
        )
    ),
}

_SCRIPTS = (
    *_some(
        _STORE,
        "test_the_calendar_of_the_store",
        "test_a_request_that_is_too_late_gets_the_time_of_the_store",
        "test_the_store_replies_with_the_time_until_its_buckets_are_full",
        "test_counts_are_stored_for_longer_than_their_window",
        "test_a_rolling_window_without_use_needs_no_time",
        "test_slots_of_a_gateway_that_has_died_are_released_for_each_holder",
        "test_the_end_of_a_period_of_the_store",
        "test_a_store_that_rejects_writes_of_hashes_is_not_opened",
        "test_a_slot_is_held_until_its_request_is_settled_or_its_lease_ends",
        "test_counts_of_rates_are_stored_until_they_are_full",
        "test_a_week_begins_on_monday",
        "test_a_day_ends_at_midnight",
        "test_a_renewal_extends_the_leases_by_their_seconds",
        "test_earlier_use_is_added_once",
        "test_earlier_use_of_another_day_is_remembered",
        "test_the_store_decides_as_the_memory_does",
        "test_the_store_and_the_memory_decide_alike_about_rates_and_waits_of_all_sizes",
        "test_tokens_refilled_by_time_are_not_released_again",
        "test_the_latest_other_day_is_remembered",
        "test_costs_are_exact",
        "test_large_costs_are_exact",
        "test_replies_of_the_store",
        "test_an_abandoned_request_that_was_refused_releases_nothing",
        "test_leases_are_renewed_after_the_clock_is_set_forward",
        "test_two_workers_count_together",
    ),
    *_some(
        f"{_FOLDER}/test_sessions.py",
        "test_the_store_counts_sessions_as_the_memory_does",
        "test_the_store_forgets_the_session_that_was_used_least_recently",
    ),
    *_some(_LEASES, "test_requests_that_outlive_their_lease_are_settled_by_their_usage", "test_shown_limits_are_without_the_lease"),
)

LIMITS_IN_REDIS = {
    f"gateway/limits/redis/{name}.lua": Tested(_SCRIPTS)
    for name in ("admit", "settle", "common", "calendar", "open", "read", "renew", "restore")
}

AREAS: Mapping[str, Area] = MappingProxyType(
    {
        "core": Area("The trusted core", CORE),
        "retry": Area("Retry", RETRY, 60),
        "ejection": Area("Ejection", EJECTION),
        "settlement": Area("Settlement", SETTLEMENT),
        "limits": Area("Limits in memory", LIMITS, 250),
        "continuation": Area("Continuation", CONTINUATION, 60),
        "queues": Area("Queues", QUEUES, 60),
        "scripts": Area("Limits in Redis", LIMITS_IN_REDIS, 60),
    }
)


def is_tried(module: str) -> bool:
    """Return whether all mutants of a module belong to an area, or those of its definitions in the trusted core."""
    return module in CORE or any(module in area.modules and not area.modules[module].only for area in AREAS.values())
