"""A module has a test file of its name. The few others are listed with the file that tests them.

``gateway/x/y.py`` is tested by ``tests/gateway/x/test_y.py``. The simulator is a tool of the tests, which compare it with vLLM as a whole.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TESTED_BY = {
    "gateway/access/actor": "gateway/access/test_permissions",
    "gateway/admin/audited": "gateway/audit/test_gateway",
    "gateway/admin/sign_in_links": "gateway/sign_in/test_gateway",
    "gateway/audit/chain": "gateway/audit/test_verification",
    "gateway/audit/entry": "gateway/audit/test_log",
    "gateway/audit/lines": "gateway/audit/test_log",
    "gateway/audit/listing": "gateway/audit/test_gateway",
    "gateway/audit/location": "gateway/audit/test_gateway",
    "gateway/auth/claims": "gateway/auth/test_jwt",
    "gateway/cli/audit_commands": "gateway/audit/test_gateway",
    "gateway/control/page_responses": "gateway/sign_in/test_gateway",
    "gateway/cli/people_commands": "gateway/admin/test_people_routes",
    "gateway/control/self_service": "gateway/self_service/test_routes",
    "gateway/self_service/paths": "gateway/self_service/test_openapi",
    "gateway/store/documents": "gateway/control/test_key_store",
    "gateway/control/sign_in": "gateway/sign_in/test_gateway",
    "gateway/sign_in/errors": "gateway/sign_in/test_routes",
    "gateway/sign_in/oidc/provider_client": "gateway/sign_in/oidc/test_provider",
    "gateway/sign_in/pages": "gateway/sign_in/test_routes",
    "gateway/sign_in/paths": "gateway/sign_in/test_browser",
    "gateway/sign_in/revocations": "gateway/sign_in/test_gateway",
    "gateway/sign_in/service": "gateway/sign_in/test_routes",
    "gateway/sign_in/settings": "gateway/sign_in/test_people",
    "gateway/sign_in/tables": "gateway/sign_in/test_people",
    "gateway/system/addresses": "gateway/client/test_addresses",
    "gateway/worker/page_requests": "gateway/sign_in/test_gateway",
    "gateway/admin/client": "gateway/cli/test_admin_commands",
    "gateway/admin/engine_metrics": "gateway/monitoring/test_engine_loads",
    "gateway/admin/limits_output": "gateway/cli/test_admin_commands",
    "gateway/admin/openapi": "gateway/admin/test_app",
    "gateway/admin/status_terminal": "gateway/admin/test_status_view",
    "gateway/admission/inflight": "gateway/admission/test_queue_full_servers",
    "gateway/admission/inflight_slot": "gateway/admission/test_queue_full_servers",
    "gateway/admission/mirror_tasks": "gateway/proxy/test_mirror",
    "gateway/api/accept": "gateway/admin/test_status_page",
    "gateway/api/reference/descriptions": "gateway/api/reference/test_document",
    "gateway/api/reference/page": "gateway/api/reference/test_document",
    "gateway/api/reference/shapes": "gateway/api/reference/test_document",
    "gateway/api/routes": "gateway/api/test_unserved",
    "gateway/api/vllm/validation": "gateway/api/vllm/test_errors",
    "gateway/auth/jwks": "gateway/auth/test_jwt",
    "gateway/check/launch_check": "gateway/check/test_preflight",
    "gateway/cli/admin_call": "gateway/cli/test_admin_commands",
    "gateway/cli/record_commands": "gateway/recording/test_gateway",
    "gateway/recording/capture": "gateway/recording/test_recorder",
    "gateway/recording/reading": "gateway/recording/test_gateway",
    "gateway/recording/replay": "gateway/recording/test_gateway",
    "gateway/cli/config_argument": "gateway/cli/test_main",
    "gateway/cli/output": "gateway/cli/test_main",
    "gateway/client/body": "gateway/client/test_connection",
    "gateway/client/flow_control": "gateway/client/test_slow_clients",
    "gateway/client/http/status_lines": "gateway/client/test_connection",
    "gateway/client/keepalive": "gateway/proxy/test_fallbacks",
    "gateway/client/request": "gateway/client/test_disconnects",
    "gateway/client/active_snapshot": "gateway/client/test_connection",
    "gateway/client/connection_context": "gateway/client/test_connection",
    "gateway/limits/key_limits": "gateway/limits/test_limits",
    "gateway/config/database_url": "gateway/config/test_problems",
    "gateway/config/explain": "gateway/config/test_problems",
    "gateway/config/load": "gateway/config/test_problems",
    "gateway/config/quantities": "gateway/config/test_models",
    "gateway/config/references": "gateway/config/test_problems",
    "gateway/config/secret": "gateway/config/test_problems",
    "gateway/config/source": "gateway/config/test_problems",
    "gateway/config/values": "gateway/config/test_models",
    "gateway/control/assembly": "gateway/control/test_control",
    "gateway/control/limit_report": "gateway/control/test_report",
    "gateway/control/publisher": "gateway/control/test_control",
    "gateway/control/readiness": "gateway/system/test_service_manager",
    "gateway/fleet/configured_servers": "gateway/fleet/test_snapshot_builder",
    "gateway/fleet/discovered_model": "gateway/monitoring/test_discovery",
    "gateway/fleet/launch_counts": "gateway/fleet/test_fleet",
    "gateway/fleet/launch_diff": "gateway/config/test_diff",
    "gateway/fleet/launched_model": "gateway/fleet/test_launched_faults",
    "gateway/fleet/observed_servers": "gateway/fleet/test_snapshot_builder",
    "gateway/fleet/operations": "gateway/fleet/test_fleet",
    "gateway/fleet/transitions": "gateway/fleet/test_reload_fleet",
    "gateway/key_management/key_file": "gateway/cli/test_keys_commands",
    "gateway/key_management/key_list": "gateway/cli/test_keys_commands",
    "gateway/key_management/litellm": "gateway/key_management/test_keys_import",
    "gateway/key_management/rotation": "gateway/store/test_decisions",
    "gateway/ledger/column": "gateway/ledger/test_insertion",
    "gateway/ledger/errors": "gateway/ledger/test_store",
    "gateway/ledger/schema": "gateway/ledger/test_store",
    "gateway/limits/expected_use": "gateway/limits/test_reservation",
    "gateway/limits/redis/scripts": "gateway/limits/redis/test_store",
    "gateway/limits/response_headers": "gateway/limits/test_headers",
    "gateway/monitoring/monitor": "gateway/control/test_control",
    "gateway/monitoring/server_observer": "gateway/fleet/test_fleet",
    "gateway/prompts/balancing_facts": "gateway/proxy/test_cost_routing",
    "gateway/proxy/exchange": "gateway/proxy/test_refusals",
    "gateway/proxy/upstream_request": "gateway/proxy/test_body",
    "gateway/snapshot/snapshot": "gateway/snapshot/test_link",
    "gateway/store/database": "gateway/store/test_service",
    "gateway/store/entries": "gateway/store/test_decisions",
    "gateway/store/errors": "gateway/store/test_decisions",
    "gateway/store/notifications": "gateway/control/test_key_store",
    "gateway/store/schema": "gateway/ledger/test_store",
    "gateway/system/file_descriptors": "gateway/client/test_eviction",
    "gateway/system/file_stat": "gateway/control/test_reload",
    "gateway/system/listener_drain": "gateway/worker/test_drain",
    "gateway/system/signals": "gateway/control/test_serve",
    "gateway/system/tls": "gateway/client/test_tls",
    "gateway/telemetry/request_record": "gateway/telemetry/test_metrics",
    "gateway/telemetry/token_rates": "gateway/admin/test_status_view",
    "gateway/usage/dimensions": "gateway/usage/test_queries",
    "gateway/usage/errors": "gateway/usage/test_queries",
    "gateway/usage/key_report": "gateway/usage/test_queries",
    "gateway/usage/output": "gateway/usage/test_queries",
    "gateway/usage/period_sums": "gateway/control/test_budgets",
    "gateway/usage/reconciliation_output": "gateway/usage/test_reconciliation_queries",
    "gateway/worker/worker": "gateway/worker/test_process",
    "upstream/balancing/cost_model": "upstream/balancing/policies/test_cost",
    "upstream/balancing/policies/policy": "upstream/balancing/policies/test_policies",
    "upstream/balancing/retry_budget": "upstream/balancing/test_attempt",
    "upstream/balancing/server": "upstream/balancing/test_pool",
    "upstream/cells": "upstream/balancing/test_pool",
    "upstream/daemon_thread": "gateway/usage/test_database",
    "upstream/discovery/sources": "upstream/discovery/test_kubernetes",
    "gateway/config/section": "gateway/config/test_models",
    "gateway/proxy/json_body": "gateway/proxy/test_body",
    "gateway/proxy/request_services": "gateway/proxy/test_context",
    "gateway/telemetry/trace": "gateway/telemetry/test_tracing",
    "upstream/settings": "gateway/config/test_models",
    "upstream/http/errors": "upstream/http/test_connection",
    "upstream/launcher/memory": "upstream/launcher/test_launcher_faults",
    "upstream/launcher/server": "upstream/launcher/test_launcher",
    "upstream/launcher/shim_process": "upstream/launcher/test_launcher",
    "upstream/vllm/bounded_get": "upstream/vllm/test_metrics",
    "upstream/vllm/gpus": "gateway/check/test_preflight",
    "upstream/vllm/installed_vllm": "gateway/check/test_preflight",
    "upstream/vllm/known_names": "upstream/vllm/test_presets",
}
"""Modules whose behavior shows only with that of another one, by the file with their tests, below ``tests``."""


def modules() -> set[str]:
    files = (*ROOT.glob("gateway/**/*.py"), *ROOT.glob("upstream/**/*.py"))
    paths = (path.relative_to(ROOT).with_suffix("") for path in files if not path.name.startswith("__"))
    return {str(path) for path in paths if "migrations" not in path.parts and "simulator" not in path.parts}


def has_own_tests(module: str) -> bool:
    path = Path(module)
    return (ROOT / "tests" / path.parent / f"test_{path.name}.py").exists()


def test_each_module_has_tests_of_its_name_or_names_the_file() -> None:
    assert {module for module in modules() if not has_own_tests(module)} == TESTED_BY.keys()


def test_the_named_files_exist() -> None:
    assert [file for file in TESTED_BY.values() if not (ROOT / "tests" / f"{file}.py").exists()] == []
