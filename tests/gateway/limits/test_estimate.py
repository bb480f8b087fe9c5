"""The estimated tokens of a request, its token limit, and the tokens that it used."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.api.errors import Refusal
from gateway.api.media_urls import InlineMedia
from gateway.api.usage import Usage
from gateway.auth.body_policy import BodyPolicy
from gateway.limits.decision import Amounts
from gateway.limits.estimate import TokenEstimate, apply_max_tokens, counts_as_request, estimate, reserved_amounts, used_amounts
from gateway.snapshot.money import Price
from gateway.snapshot.snapshot import BodyRules
from gateway.system.steps import finished
from tests.support.money import price
from tests.support.rows import each_row

BATCH = "/v1/chat/completions/batch"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


@each_row(
    ("path", "fields", "completion"),
    [
        (CHAT, {}, 1024),
        (CHAT, {"max_tokens": 50}, 50),
        (CHAT, {"max_tokens": 50, "max_completion_tokens": 70}, 70),
        (CHAT, {"max_tokens": None}, 1024),
        (CHAT, {"max_tokens": 50, "n": 3}, 150),
        (CHAT, {"max_tokens": "50", "n": "3"}, 150),
        (CHAT, {"max_tokens": 50.0, "n": 3.0}, 150),
        (CHAT, {"max_tokens": "x", "n": "x"}, 1024),
        (CHAT, {"max_tokens": 50.5, "n": [3]}, 1024),
        (CHAT, {"max_tokens": 50, "n": None}, 50),
        (CHAT, {"max_tokens": True}, 1),
        (CHAT, {"max_completion_tokens": False, "max_tokens": " 7_0 "}, 70),
        (CHAT, {"max_tokens": 50, "n": 3, "use_beam_search": True, "best_of": 9}, 150),
        (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": "5.0", "n": 2.0}, 20),
        (RESPONSES, {"max_output_tokens": 9.0}, 9),
        (MESSAGES, {"max_tokens": "8"}, 8),
        (BATCH, {"messages": [[{}], [{}], [{}]], "max_tokens": 50}, 150),
        (BATCH, {"messages": [[{}], [{}]]}, 2048),
        (BATCH, {"messages": "x", "max_tokens": 50}, 50),
        (CHAT, {"max_tokens": -1}, 1024),
        (COMPLETIONS, {"prompt": "a"}, 16),
        (COMPLETIONS, {"prompt": "a", "max_tokens": None}, 1024),
        (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 5, "n": 2}, 20),
        (COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 5}, 5),
        (COMPLETIONS, {"prompt": [[1, 2], [3]], "max_tokens": 5}, 10),
        (RESPONSES, {"max_output_tokens": 9}, 9),
        (MESSAGES, {"max_tokens": 8}, 8),
        ("/v1/embeddings", {"input": "a", "max_tokens": 8}, 0),
    ],
)
def test_completion_tokens_are_estimated(path: str, fields: dict[str, Any], completion: int) -> None:
    guess = estimate(fields, path, 400, InlineMedia())
    assert (guess.prompt, guess.completion) == (100, completion)
    assert guess.completion % guess.choices == 0


def estimated_prompt(body: bytes) -> int:
    """Return the estimated prompt of a body whose media URLs are allowed."""
    document = orjson.loads(body)
    media = finished(BodyPolicy(BodyRules(media_hosts=("*",)), {}, {}).apply(document, len(body), large=False))
    return estimate(document, CHAT, len(body), media).prompt


def test_media_is_not_counted_by_its_bytes() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    body = orjson.dumps({"messages": [{"role": "user", "content": [part, part, {"type": "text", "text": "b" * 4000}]}]})
    assert 3048 <= estimated_prompt(body) <= 3148


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


URL = "data:;base64," + "A" * 40_000
PLAIN = "data:text/plain," + "A" * 40_000  # a text, which counts by its length


@each_row(
    ("document", "media"),
    [
        ({"messages": [{"role": "user", "content": ";base64," + "A" * 40_000}]}, 0),
        ({"messages": [{"role": "user", "content": URL}]}, 0),
        ({"prompt": URL}, 0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": URL}]}]}, 0),
        ({"messages": [{"role": "user", "content": [image("https://a.example/" + URL[:4000])]}]}, 0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "source": URL}]}]}, 0),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {"image_url": URL}}]}]}, 0),
        ({"messages": [{"role": "assistant", "arguments": [image(URL)]}]}, 0),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"image_url": URL}}}]}, 0),
        ({"messages": [{"role": "user", "content": [image(PLAIN)]}]}, 0),
        ({"messages": [{"role": "user", "content": "a"}] * 20 + [{"role": "user", "content": [image(URL), image(PLAIN)]}]}, 1),
        ({"messages": [{"role": "user", "content": [image(URL), image("DATA:" + URL[5:])]}]}, 2),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}, 1),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": URL}}]}]}, 1),
        ({"documents": {"content": [{"type": "video_url", "video_url": {"url": URL}}]}}, 1),
    ],
)
def test_media_is_found_where_messages_contain_it(document: dict[str, Any], media: int) -> None:
    """Count only the fields that hold media. Text that looks like a media URL counts as text."""
    body = orjson.dumps(document)
    urls = media * len(URL)
    assert estimated_prompt(body) == max((len(body) - urls) // 4 + media * 1024, 1)


@pytest.mark.parametrize(
    ("path", "fields", "becomes"),
    [
        (CHAT, {}, {"max_tokens": 100}),
        (CHAT, {"max_tokens": None}, {"max_tokens": 100}),
        (CHAT, {"max_completion_tokens": 100}, {"max_completion_tokens": 100}),
        (CHAT, {"max_tokens": 100.0}, {"max_tokens": 100.0}),
        (CHAT, {"max_tokens": "100"}, {"max_tokens": "100"}),
        (COMPLETIONS, {}, {}),
        (COMPLETIONS, {"max_tokens": None}, {"max_tokens": 100}),
        (RESPONSES, {}, {"max_output_tokens": 100}),
        (MESSAGES, {"max_tokens": 3}, {"max_tokens": 3}),
        ("/v1/embeddings", {}, {}),
    ],
)
def test_the_output_limit_is_applied(path: str, fields: dict[str, Any], becomes: dict[str, Any]) -> None:
    apply_max_tokens(fields, path, 100)
    assert fields == becomes


def test_an_output_limit_may_be_lower_than_the_servers_default() -> None:
    fields: dict[str, Any] = {}
    apply_max_tokens(fields, COMPLETIONS, 10)
    assert fields == {"max_tokens": 10}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 101},
        {"max_tokens": 5, "max_completion_tokens": 101},
        {"max_tokens": "101"},
        {"max_tokens": 101.0},
        {"max_tokens": "1_0_1"},
        {"max_tokens": 5.5},
        {"max_tokens": "x"},
        {"max_tokens": [5]},
    ],
)
def test_a_request_above_the_output_limit_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as caught:
        apply_max_tokens(fields, CHAT, 100)
    assert (caught.value.code, caught.value.param) == ("invalid_value", list(fields)[-1])


def test_costs() -> None:
    used = Usage(1_000_000, 500_000, cached=400_000, reasoning=100_000)
    assert used_amounts(used, price(0.5, 4.0), 1) == Amounts(1, 0, 1_500_000, 2_500_000_000)
    assert used_amounts(used, price(0.5, 4.0, cached=0.05, reasoning=6.0), 1).cost == 300_000_000 + 20_000_000 + 1_600_000_000 + 600_000_000
    assert used_amounts(used, None, 1).cost == 0


@pytest.mark.parametrize(
    ("each", "cost"),
    [
        (price(0.5, 4.0), 2_500_000_000),
        (price(0.5, 4.0, cached=0.1, reasoning=3.0), 2_500_000_000),
        (price(0.5, 4.0, cached=0.6, reasoning=8.0), 4_600_000_000),
        (None, 0),
    ],
)
def test_a_reservation_covers_the_higher_prices(each: Price | None, cost: int) -> None:
    """Which tokens are cached or reasoning is known only afterwards."""
    assert reserved_amounts(TokenEstimate(1_000_000, 500_000), each) == Amounts(1, 1, 1_500_000, cost)


@pytest.mark.parametrize(
    ("status", "counts"), [(200, True), (400, True), (404, True), (499, True), (429, False), (500, False), (503, False)]
)
def test_which_statuses_count_as_a_request(status: int, counts: bool) -> None:
    assert counts_as_request(status) is counts
