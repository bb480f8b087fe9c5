"""Check the requests of the API reference against the real vLLM's own request models."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gateway.api.reference import document
from gateway.auth.body_policy import FORBIDDEN, OLD_NAMES
from tests.vllm.server import ENVIRONMENT, NOT_INSTALLED, installed

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

MODELS = {
    "ChatRequest": ["openai.chat_completion:ChatCompletionRequest"],
    "CompletionRequest": ["openai.completion:CompletionRequest"],
    "ResponsesRequest": ["openai.responses:ResponsesRequest"],
    "MessagesRequest": ["anthropic:AnthropicMessagesRequest"],
    "CountTokensRequest": ["anthropic:AnthropicCountTokensRequest"],
    "EmbeddingsRequest": ["pooling.embed:EmbeddingCompletionRequest", "pooling.embed:EmbeddingChatRequest"],
    "PoolingRequest": ["pooling.pooling:PoolingCompletionRequest", "pooling.pooling:PoolingChatRequest"],
    "ClassifyRequest": ["pooling.classify:ClassificationCompletionRequest", "pooling.classify:ClassificationChatRequest"],
    "ScoreRequest": [f"pooling.scoring:Score{pair}Request" for pair in ("Text", "Data", "QueriesDocuments", "QueriesItems")],
    "RerankRequest": ["pooling.scoring:RerankRequest"],
    "TranscriptionRequest": ["speech_to_text.transcription:TranscriptionRequest"],
    "TranslationRequest": ["speech_to_text.translation:TranslationRequest"],
    "TokenizeRequest": ["serve.tokenize:TokenizeCompletionRequest", "serve.tokenize:TokenizeChatRequest"],
    "DetokenizeRequest": ["serve.tokenize:DetokenizeRequest"],
}
OURS = {"extra_body", "metadata", *(old for names in OLD_NAMES.values() for old in names)}
"""Fields that the gateway adds: it merges, translates or records them."""
ONLY_OURS = {"ChatRequest": {"prompt"}, "CompletionRequest": {"best_of"}}
NOT_DOCUMENTED = {"prompt_embeds", "logits_processors"}
"""Fields that a server accepts only if it is started with certain options."""

SCRIPT = """
import importlib, json, sys
found = {}
for schema, names in json.loads(sys.argv[1]).items():
    found[schema] = []
    for name in names:
        module, _, model = name.partition(":")
        found[schema] += getattr(importlib.import_module(f"vllm.entrypoints.{module}.protocol"), model).model_fields
print(json.dumps(found))
"""


def test_a_request_is_documented_with_all_fields_of_vllm(tmp_path: Path) -> None:
    command = installed()
    assert command is not None
    environ = {**ENVIRONMENT, "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command_line = [str(command.parent / "python"), "-c", SCRIPT, json.dumps(MODELS)]
    done = subprocess.run(command_line, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    known = {schema: set(fields) for schema, fields in json.loads(done.stdout.splitlines()[-1]).items()}
    schemas = document()["components"]["schemas"]
    for schema, fields in known.items():
        reported = set(schemas[schema]["properties"])
        assert fields - reported - FORBIDDEN - NOT_DOCUMENTED == set(), schema
        assert reported - fields - OURS - ONLY_OURS.get(schema, set()) == set(), schema
