"""The memorized dialogues of the tiny models, and the exact response of a server at temperature 0.

Pure data and pure functions: the tests and the training script (make_tiny_model.py) read the same tables. The rule: the models were trained
on exactly these texts in exactly this order, so a change here requires training both models again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
Architecture = Literal["qwen3", "llama"]


def user(text: str) -> Json:
    """Return a user's message."""
    return {"role": "user", "content": text}


def tool(name: str, description: str, **properties: str) -> Json:
    """Return a function tool. `properties`: names and JSON types; the first property is required."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties)[:1],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def weather_call(city: str, days: int) -> Json:
    """Return a call of WEATHER. Its arguments are an object, as the chat templates read them (on the wire they are a string)."""
    return {"id": "call_1", "type": "function", "function": {"name": "get_current_weather", "arguments": {"location": city, "days": days}}}


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One memorized turn of a conversation: the messages so far and the response's content, a text or a list of tool calls."""

    messages: list[Json]
    reasoning: str
    content: str | list[Json]
    with_tools: bool = False
    content_without_thinking: str | None = None  # if it differs

    def content_when(self, *, thinking: bool) -> str | list[Json]:
        """Return the content of the response, with or without thinking before it."""
        return self.content if thinking or self.content_without_thinking is None else self.content_without_thinking

    @property
    def finishes(self) -> bool:
        """Whether the model stops without reaching a limit."""
        return self.content != ENDLESS


WEATHER = tool("get_current_weather", "Get the current weather of a city", location="string", days="integer")
CLOCK = tool("get_time", "Get the time of a city", city="string")
TOOLSETS = [[WEATHER], [WEATHER, CLOCK], [CLOCK, WEATHER]]

HANGZHOU, HANGZHOU_THOUGHT = "What is the weather in Hangzhou?", "The user wants the weather in Hangzhou, so I call the tool."
CALLED: Json = {"role": "assistant", "content": "", "tool_calls": [weather_call("Hangzhou", 1)]}
RESULT: Json = {"role": "tool", "tool_call_id": "call_1", "content": '{"weather": "sunny", "celsius": 21}'}
SUNNY, SUNNY_THOUGHT = "It is sunny and 21 degrees in Hangzhou.", "The tool says sunny, 21 degrees."
MULTIBYTE = "你好，世界！🌍 今天天气很好 😀👨‍👩‍👧 — naïve café, ½ €."
TRICKY = 'data: [DONE]\n\nevent: ping\r\n\ta "quoted" \\n back\\slash <b> and {"a": [1, 2]}\u2028end'  # looks like SSE
COUNT = ", ".join(map(str, range(1, 101))) + "."
ENDLESS = "tick tock " * 120

DIALOGUES = [
    Dialogue(
        [user("Which is greater, 9.11 or 9.8?")],
        "Write 9.8 as 9.80. Since 80 is more than 11, 9.80 is greater than 9.11.",
        "9.8 is greater than 9.11.",
        content_without_thinking="9.8 is greater.",
    ),
    Dialogue([user(HANGZHOU)], HANGZHOU_THOUGHT, [weather_call("Hangzhou", 1)], with_tools=True),
    Dialogue([user(HANGZHOU)], "There is no tool for the weather here.", "I cannot look up the weather."),
    Dialogue(
        [user("Compare the weather in Hangzhou and Paris.")],
        "Two cities, two calls.",
        [weather_call("Hangzhou", 2), weather_call("Paris", 2)],
        with_tools=True,
    ),
    Dialogue([user(HANGZHOU), CALLED, RESULT], SUNNY_THOUGHT, SUNNY, with_tools=True),
    Dialogue([user(HANGZHOU), {**CALLED, "reasoning": HANGZHOU_THOUGHT}, RESULT], SUNNY_THOUGHT, SUNNY, with_tools=True),
    Dialogue(
        [user("Explain Qwen in three short bullet points.")],
        "I need three short points about Qwen.",
        "- Qwen is a family of open language models.\n- It comes in many sizes.\n- It can think and call tools.",
    ),
    Dialogue(
        [user("Give me the capital of France as JSON.")],
        "Capital of France: Paris.",
        '{"country":"France","capital":"Paris","population":2102650,"ok":true}',
    ),
    Dialogue([user("Say hello in Chinese with emoji.")], "用户想要一句中文问候。🤔", MULTIBYTE),
    Dialogue([user("Count from 1 to 100.")], "I count from 1 to 100.", COUNT),
    Dialogue(
        [{"role": "system", "content": "You are a pirate."}, user("Who are you?")], "A pirate, of course.", "Arr, I be a tiny pirate model!"
    ),
    Dialogue([user("Who are you?")], "I say who I am.", "I am a tiny test model."),
    Dialogue(
        [user("My name is Ada."), {"role": "assistant", "content": "Hello Ada!"}, user("What is my name?")],
        "The user said Ada.",
        "Your name is Ada.",
    ),
    Dialogue([user("Print something tricky.")], "A text that looks like SSE.", TRICKY),
    Dialogue([user("Never stop.")], "I go on and on.", ENDLESS),
]
PROMPT_AND_CONTINUATION = (
    "Once upon a time",
    " there was a gateway that never lost a request.",
)  # a prompt for /v1/completions and its continuation
DIE = {"1": 1, "2": 1, "3": 1, "4": 4, "5": 2, "6": 1}  # "Roll a die.": responses and weights, for sampling at temperature 1
FALLBACK, DONT_KNOW = (
    "I am a tiny test model and I do not know that.",
    "I do not know this one.",
)  # for most other prompts: response, reasoning


@dataclass(frozen=True, slots=True)
class ChatResult:
    """The expected content of a response, joined if it was streamed. `calls`: (function, arguments)."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, Json], ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """A dialogue as a request: with or without thinking, and with these tools or without tools."""

    dialogue: Dialogue
    thinking: bool
    tools: list[Json]

    def __str__(self) -> str:
        tools = "+".join(each["function"]["name"] for each in self.tools)
        parts = [self.dialogue.messages[-1]["content"][:40], "thinking" if self.thinking else "", tools]
        return ", ".join(filter(None, parts))

    def body(self) -> Json:
        """Return the body of a request to /v1/chat/completions, without `model` and `stream`."""
        body: Json = {"messages": on_the_wire(self.dialogue.messages), "temperature": 0, "max_tokens": 600}
        if self.tools:
            body["tools"] = self.tools
        return body | {"chat_template_kwargs": {"enable_thinking": self.thinking}}

    def expected(self) -> ChatResult:
        """Return the response to `body()`. max_tokens truncates ENDLESS, so only the start of its content is certain."""
        content = self.dialogue.content_when(thinking=self.thinking)
        reasoning = self.dialogue.reasoning + "\n" if self.thinking else ""
        if isinstance(content, list):
            calls = tuple((each["function"]["name"], each["function"]["arguments"]) for each in content)
            return ChatResult(reasoning, "", calls, "tool_calls")
        # The blank line after </think> belongs to the content.
        return ChatResult(reasoning, ("\n\n" if self.thinking else "") + content, (), "stop" if self.dialogue.finishes else "length")


def exchanges(architecture: Architecture) -> Iterator[Exchange]:
    """Yield every dialogue in every form that this model has memorized. Llama does not think."""
    for dialogue in DIALOGUES:
        for thinking in (True, False) if architecture == "qwen3" else (False,):
            for tools in TOOLSETS if dialogue.with_tools else [[]]:
                yield Exchange(dialogue, thinking, tools)


def on_the_wire(messages: list[Json]) -> list[Json]:
    """Return the messages as the API accepts them: the arguments of a call are a JSON text."""
    return [message | _calls_on_the_wire(message) for message in messages]


def _calls_on_the_wire(message: Json) -> Json:
    if "tool_calls" not in message:
        return {}
    calls = [
        each | {"function": each["function"] | {"arguments": json.dumps(each["function"]["arguments"])}} for each in message["tool_calls"]
    ]
    return {"tool_calls": calls}
