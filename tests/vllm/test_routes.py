"""Check the tables of routes against the routes that the real vLLM registers with every feature enabled."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from gateway.api.routes import REFUSED, ROUTES
from tests.vllm.server import NOT_INSTALLED, installed
from upstream.vllm.capabilities import TASK_ROUTES

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

OWN = {("GET", "/health"), ("GET", "/version"), ("GET", "/v1/models")}
"""Routes that the gateway serves itself."""
NEEDS_COHERE = {"/cohere/v2/chat", "/cohere/v2/chat/render"}
"""Routes that vLLM registers only if Cohere's package is installed."""
SWITCHES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
PROGRAM = """
import json
from types import SimpleNamespace
from vllm.config import ProfilerConfig
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.tasks import GENERATION_TASKS, POOLING_TASKS
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--enable-fault-tolerance", "--enable-scale-out"])
args.profiler_config = ProfilerConfig(profiler="torch", torch_profiler_dir="/tmp")
args.enable_tokenizer_info_endpoint = True
embeds = SimpleNamespace(get_pooling_task=lambda tasks: "embed")  # the routes for scores are registered too
apps = [build_app(args, tasks, embeds) for tasks in (GENERATION_TASKS, POOLING_TASKS)]
print(json.dumps([[sorted(getattr(route, "methods", None) or ["GET"]), route.path] for app in apps for route in app.routes]))
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """Return every method and path of vLLM's generate and pooling servers."""
    python = Path(str(installed())).with_name("python")
    environ = {**os.environ, **SWITCHES, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    done = subprocess.run([python, "-c", PROGRAM], env=environ, capture_output=True, text=True, check=True, timeout=250)
    found = {(method, path) for methods, path in json.loads(done.stdout.splitlines()[-1]) for method in methods}
    return {(method, path) for method, path in found if method != "HEAD"}


def test_every_route_of_vllm_is_served_or_refused(real: set[tuple[str, str]]) -> None:
    served = {("POST", route.upstream) for route in ROUTES.values()} | OWN
    refused = {(method, path) for path, (method, _) in REFUSED.items() if path not in NEEDS_COHERE}
    assert real == served | refused | {("POST", "/ping")}


def test_what_a_model_is_for_shows_in_these_routes(real: set[tuple[str, str]]) -> None:
    assert {("POST", path) for path in TASK_ROUTES} <= real
    assert not {("GET", path) for path in TASK_ROUTES} & real, "a GET is answered with 405"


def test_no_served_route_is_the_gateways_invention(real: set[tuple[str, str]]) -> None:
    invented = {path for path in ROUTES if ("POST", path) not in real}
    assert invented == {"/v1/classify", "/v1/pooling"}
