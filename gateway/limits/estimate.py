"""Estimate what a request may use before it is sent. Pure.

The rule: an estimate is only reserved; the final count is the settlement of the request (``gateway.api.settlement``).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple

import msgspec

from gateway.api.errors import invalid_value
from gateway.api.media_urls import InlineMedia
from gateway.api.routes import OUTPUTS, Output
from gateway.api.settlement import BYTES_PER_TOKEN
from gateway.api.vllm.choices import choices_and_prompts
from gateway.api.vllm.lax_int import MAX_INT, lax_int
from gateway.limits.decision import Amounts
from gateway.limits.windows import Capacity
from gateway.snapshot.money import Price, TokenCounts, completion_within, cost_of, highest_cost

DEFAULT_COMPLETION = 1024
"""Tokens of a response whose request sets no limit. With a hard budget: the least that it gets, if they are left."""
SHARES = 32
"""With a hard budget, a request that does not limit its response gets one of these equal shares of what is left."""
MEDIA_TOKENS = 1024
"""Tokens for an image, audio or video in the body, as a ``data:`` URL."""


class TokenEstimate(msgspec.Struct, frozen=True, gc=False):
    """Tokens that one request may use."""

    prompt: int = 0
    completion: int = 0
    choices: int = 1
    """Number of choices that ``completion`` covers."""


def estimate(document: Mapping[str, Any], path: str, size: int, media: InlineMedia) -> TokenEstimate:
    """Estimate the maximum use of a request.

    ``path`` is the path at the server. ``size`` and ``media``: of the body as the client sent it.
    """
    output = OUTPUTS.get(path)
    prompt = size // BYTES_PER_TOKEN
    if media.count and not media.in_arguments:
        prompt = max(size - media.size, 0) // BYTES_PER_TOKEN + media.count * MEDIA_TOKENS
    choices = 1
    if "n" in document or "prompt" in document:
        each, prompts = choices_and_prompts(document)
        choices = each * prompts
    if output is None:
        return TokenEstimate(prompt or 1, 0, choices)
    if output.batch is not None and isinstance(conversations := document.get(output.batch), list):
        choices *= len(conversations)
    return TokenEstimate(prompt or 1, (stated_limit(document, output) or DEFAULT_COMPLETION) * choices, choices)


def stated_limit(document: Mapping[str, Any], output: Output) -> int | None:
    """Return the limit of a response that the request sets, or the route by default; None without a limit."""
    for name in output.names:
        if name in document:
            value = document[name]
            number = value if type(value) is int else lax_int(value)
            if number is not None and number > 0:
                return number
    return None if output.names[-1] in document else output.default


class HardBudgets(NamedTuple):
    """The hard budgets that count a request: the capacity that is left, the whole capacity, and the price of the model."""

    left: Capacity
    whole: Capacity
    price: Price | None


def bound_response(
    document: dict[str, Any], path: str, estimated: TokenEstimate, budgets: HardBudgets, context: int | None, most: int | None
) -> TokenEstimate:
    """Limit a response, so that the request uses no more of hard budgets than it reserves. Returns the new estimate.

    A request without a limit gets one. A limit that exceeds a whole budget is lowered to what fits into it, because such a request is
    admitted while the budget is unused. ``context`` is the model's, None if it is not known. ``most``: a limit that was reserved before.
    """
    if (output := OUTPUTS.get(path)) is None:
        return estimated
    prompt, choices = estimated.prompt, estimated.choices
    fits = max(_completion_capacity(budgets.whole, prompt, budgets.price) // choices, 1)
    if (stated := stated_limit(document, output)) is not None:
        if stated > fits:
            document.update(dict.fromkeys(output.names, fits))
        return estimated
    each = _share(budgets, prompt, choices, context)
    if most is not None and most < each:
        each = most
    if document.get(output.names[-1]) is None:  # a server refuses every other value that is no limit
        document[output.names[-1]] = each if each < fits else fits
    return TokenEstimate(prompt, each * choices, choices)


def bound_form(estimated: TokenEstimate, budgets: HardBudgets, context: int) -> tuple[TokenEstimate, int]:
    """Do the same for the response to a form. Returns its limit too."""
    each = _share(budgets, estimated.prompt, 1, context)
    fits = max(_completion_capacity(budgets.whole, estimated.prompt, budgets.price), 1)
    return TokenEstimate(estimated.prompt, each), min(each, fits)


def _share(budgets: HardBudgets, prompt: int, choices: int, context: int | None) -> int:
    """Return the limit of a response without one. A server refuses a limit above its context, so an unknown context gets no large share."""
    if context is None:
        return DEFAULT_COMPLETION
    share = _completion_capacity(budgets.left, prompt, budgets.price) // (SHARES * choices)
    return min(max(share, DEFAULT_COMPLETION), context)


def _completion_capacity(capacity: Capacity, prompt: int, price: Price | None) -> int:
    """Return the completion tokens that fit into a capacity beside a prompt."""
    tokens = capacity.tokens - prompt
    if price is not None and capacity.cost < inf:
        tokens = min(tokens, completion_within(int(capacity.cost), prompt, price))
    return int(tokens) if tokens < MAX_INT else MAX_INT


def apply_max_tokens(document: dict[str, Any], path: str, limit: int | None) -> None:
    """Limit the tokens of a response: refuse a request for more, and set the limit if the request has none. Raises Refusal."""
    output = OUTPUTS.get(path)
    if output is None or limit is None:
        return
    given = [name for name in output.names if document.get(name) is not None]
    for name in given:
        value = document[name]
        if type(value) is not int:
            value = lax_int(value)
        if value is None:
            raise invalid_value(f"The field '{name}' must be a whole number.", param=name)
        if value > limit:
            raise invalid_value(f"The field '{name}' may be {limit} at most for this key.", param=name)
    unsaid = output.default is None or output.names[-1] in document
    if not given and (unsaid or (output.default or 0) > limit):
        document[output.names[-1]] = limit


def reserved_amounts(tokens: TokenEstimate, price: Price | None) -> Amounts:
    """Return the amounts that a request reserves: one request, one slot, its tokens, and their maximum cost."""
    cost = 0 if price is None else highest_cost(tokens.prompt, tokens.completion, price)
    return Amounts(1, 1, tokens.prompt + tokens.completion, cost)


def used_amounts(tokens: TokenCounts, price: Price | None, requests: int) -> Amounts:
    """Return what a finished request has used."""
    return Amounts(requests, 0, tokens.prompt + tokens.completion, 0 if price is None else cost_of(tokens, price))


def counts_as_request(status: int) -> bool:
    """Check whether a request counts for the limits on requests. A request that was refused or failed does not count."""
    return status < 500 and status != 429
