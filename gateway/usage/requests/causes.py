"""The meaning of each error for an operator, in one sentence. docs/operators/errors-by-code.md says more, and a test compares the codes."""

from __future__ import annotations

from collections.abc import Mapping

CAUSES: Mapping[str, str] = {
    "invalid_json": "The body is not a JSON object.",
    "invalid_value": "A field has an invalid value, or is not allowed.",
    "invalid_request": "The bytes are not valid HTTP, or the server rejected the request without naming a field.",
    "feature_not_enabled": "The request needs an option of vLLM that is off for this model.",
    "missing_required_parameter": "A required field is missing.",
    "context_length_exceeded": "Prompt and response are longer than the context of the model.",
    "missing_api_key": "The request has no key, or its header is empty.",
    "invalid_api_key": "The key is not configured, is malformed, or was revoked.",
    "expired_api_key": "The key has expired.",
    "model_not_found": "The model does not exist, or the key may not use it.",
    "not_found": "The path is not served, or the model does not serve this route.",
    "permission_denied": "The person may not do this in self-service, or the request came from another page.",
    "conflict": "The change of a key was refused in self-service; the message says why.",
    "method_not_allowed": "The route requires another method.",
    "request_timeout": "The client sent its request too slowly.",
    "request_too_large": "The body is larger than a bound of server.body_limit, body_values or body_memory.",
    "unsupported_media_type": "The content type is not JSON, or the content encoding is not accepted.",
    "headers_too_large": "The request line and headers are larger than 64 KiB.",
    "rate_limit_exceeded": "A rate limit is reached.",
    "insufficient_quota": "A budget is used up, or less is left than the request reserves.",
    "server_error": "The server of the model failed on this request.",
    "internal_error": "The gateway failed; its standard error has the cause under this ID.",
    "upstream_unreachable": "The gateway could not connect to the server.",
    "upstream_disconnected": "The server closed the connection, or sent an invalid response.",
    "upstream_timeout": "The server did not respond within the timeouts of the model.",
    "model_loading": "The model was starting, and the queue was full or the wait had timed out.",
    "overloaded": "All servers or the gateway were at their limit, and the queue was full, or its wait too long.",
    "draining": "The gateway was stopping.",
    "no_healthy_server": "No server of the model was up or starting.",
}

OF_QUEUES: Mapping[str, str] = {
    "queue_full": "The queue was full.",
    "queue_timeout": "The request had waited for as long as the queue allows.",
    "queue_predicted": "The predicted wait was too long for the deadline of the request.",
    "queue_late": "The request waited until it could no longer meet its deadline.",
}
"""Why a queue refused a request, by ``reason``."""

OF_ENDS: Mapping[str, str] = {
    "client": "The client disconnected before the end of the response.",
    "upstream": "The server ended the response too early.",
    "drain": "The gateway was stopped before the end of the response.",
    "lost": "The worker process died before the end of the response.",
}
"""The end of a truncated response, by ``incomplete``."""
