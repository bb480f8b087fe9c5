"""The requests of the documents as data: the request that a reader would paste, and the shape of the documented response.

``document`` is one of: ``llama`` and ``qwen`` (bearer key, exact model IDs), ``generic`` (aliases, ``extra_body``), ``instance`` (instance
URLs, no key), ``light`` (raw prompts, no key).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.conformance import shapes

Json = dict[str, Any]

KEY = "your-hexgrid-api-key"
QWEN = "Qwen/Qwen3.6-35B-A3B-FP8"
LLAMA = "meta-llama/Llama-3.3-70B-Instruct"
OTHER_LLAMAS = [f"meta-llama/Meta-Llama-3.1-{size}-Instruct" for size in ("8B", "70B", "405B")]
DEPLOYED, INSTANCED, LIGHT = "your-model-or-deployment-id", "your-model-name", "meta-llama/Llama-3.1-8B-Instruct"
ALIASES = [*OTHER_LLAMAS, LIGHT, DEPLOYED, INSTANCED]
MOUNT = "/i-7f3a/3900"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Case:
    """A request by ``curl``. ``usage`` and ``reasoning`` say what a stream must have; ``shape`` is that of a whole answer.

    ``tiny`` is another answer that the tests' real models may give, which have learned a handful of dialogues and nothing else.
    """

    name: str
    body: Json
    shape: Json | None = None
    usage: bool = False
    reasoning: bool = False
    path: str = CHAT
    key: str | None = KEY
    accept: str = "*/*"
    tiny: Json | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def data(self) -> bytes:
        """The bytes after ``-d``."""
        return json.dumps(self.body, indent=2, ensure_ascii=False).encode()


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def weather(location: Json, unit: Json | None = None) -> list[Json]:
    """Return the tool of the documents. The description of its parameters differs by example."""
    properties = {"location": {"type": "string", **location}}
    if unit is not None:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"], **unit}
    parameters = {"type": "object", "properties": properties, "required": ["location"]}
    description = "Get the current weather for a city or district."
    return [{"type": "function", "function": {"name": "get_current_weather", "description": description, "parameters": parameters}}]


def called(city: str, result: Json) -> list[Json]:
    """Return a tool call and its result in the form of the documents."""
    arguments = json.dumps({"location": city, "unit": "celsius"}, separators=(",", ":"))
    call = {"id": "call_abc123", "type": "function", "function": {"name": "get_current_weather", "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_abc123", "content": json.dumps({"location": city, **result}, separators=(",", ":"))},
    ]


STREAMED: Json = {"stream": True, "stream_options": {"include_usage": True}}
THINKING: Json = {"chat_template_kwargs": {"enable_thinking": True}}
NOT_THINKING: Json = {"chat_template_kwargs": {"enable_thinking": False}}
ONE_CALL: Json = {"parallel_tool_calls": False}
NAMED: Json = {"tool_choice": {"type": "function", "function": {"name": "get_current_weather"}}}
COMPARED = "Which is greater, 9.11 or 9.8?"
HELPFUL, USING_TOOLS = system("You are a helpful assistant."), system("You are a helpful assistant. Use tools when needed.")
ONLY_JSON, BY_SCHEMA = (
    system(f"{text}.")
    for text in ("You are a helpful assistant. Return only valid JSON", "Return only JSON that matches the provided schema")
)
CONCISE, FIVE_NAMES = (
    system("You are a helpful assistant. Keep the answer concise."),
    user("Give me five naming ideas for an AI inference platform."),
)
TAGLINES = user("Create a JSON object with three short product tagline ideas for a note-taking app.")
THREE_TAGLINES = user("Create three short product tagline ideas for a note-taking app.")
SCHEMA: Json = {
    "type": "object",
    "properties": {"taglines": {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}},
    "required": ["taglines"],
    "additionalProperties": False,
}
JSON_MODE: Json = {"response_format": {"type": "json_object"}}
JSON_SCHEMA: Json = {"response_format": {"type": "json_schema", "json_schema": {"name": "tagline_response", "schema": SCHEMA}}}
PENALTIES: Json = {"min_p": 0.0, "repetition_penalty": 1.05, "presence_penalty": 0.2, "frequency_penalty": 0.2}
WEIGHED: Json = {"max_tokens": 512, "seed": 1234, "n": 1, "logprobs": True, "top_logprobs": 2}


def llama(
    name: str, messages: list[Json], shape: Json | None = None, *, tiny: Json | None = None, usage: bool = False, **rest: Any
) -> Case:
    return Case(name, {"model": LLAMA, "messages": messages, **rest}, shape, usage, tiny=tiny)


_P9: Json = {"top_p": 0.9}
_TOKYO = user("What is the weather in Tokyo today?")
_CAREFUL = system("You are a careful reasoning assistant. Solve the problem step by step internally, then provide a concise final answer.")
_CITY, _UNIT = {"description": "City or district."}, {"description": "Temperature unit."}

LLAMA_CASES = [
    llama("chat", [HELPFUL, user("Give me a one-sentence explanation of what Llama is.")],
          shapes.TEXT, temperature=0.7, max_tokens=256, **_P9),
    llama("reasoning style", [_CAREFUL, user(f"{COMPARED} Explain briefly.")], shapes.TEXT, temperature=0.3, max_tokens=512, **_P9),
    llama("stream", [HELPFUL, user("Explain Llama 3.3 in three short bullet points.")],
          usage=True, temperature=0.7, max_tokens=256, **STREAMED, **_P9),
    llama("tools, auto", [USING_TOOLS, _TOKYO], shapes.CALLED, tiny=shapes.TEXT,
          temperature=0.2, max_tokens=512, tool_choice="auto", **ONE_CALL,
          tools=weather({"description": "City or district, such as Tokyo, San Francisco, or Bengaluru."}, _UNIT)),
    llama("tools, required", [user("Find the current weather for Tokyo.")], shapes.CALLED, temperature=0.2, max_tokens=512,
          tool_choice="required", tools=weather(_CITY), **ONE_CALL),
    llama("tools, named", [user("Use the weather tool to check Tokyo.")], shapes.CALLED_BY_NAME, temperature=0.2, max_tokens=512,
          tools=weather({}, {}), **NAMED, **ONE_CALL),
    llama("tool result", [_TOKYO, *called("Tokyo", {"temperature": 22, "condition": "Partly cloudy", "unit": "celsius"})],
          shapes.TEXT, tiny=shapes.CALLED, max_tokens=1024),
    llama("JSON mode", [ONLY_JSON, TAGLINES], shapes.JSON_OBJECT, tiny=shapes.CUT, temperature=0.7, max_tokens=512, **JSON_MODE, **_P9),
    llama("JSON schema", [BY_SCHEMA, THREE_TAGLINES], shapes.TAGLINES, tiny=shapes.CUT,
          temperature=0.7, max_tokens=512, **JSON_SCHEMA, **_P9),
    llama("many parameters", [CONCISE, FIVE_NAMES], shapes.WEIGHED, temperature=0.7, top_k=40, stream=False, **PENALTIES, **WEIGHED, **_P9),
]  # fmt: skip


def qwen(
    name: str,
    messages: list[Json],
    shape: Json | None = None,
    *,
    tiny: Json | None = None,
    usage: bool = False,
    reasoning: bool = False,
    **rest: Any,
) -> Case:
    return Case(name, {"model": QWEN, "messages": messages, **rest}, shape, usage, reasoning, tiny=tiny)


_P8: Json = {"temperature": 0.7, "top_p": 0.8}
_HANGZHOU = user("What is the weather in Hangzhou?")

QWEN_CASES = [
    qwen("chat", [HELPFUL, user("Give me a one-sentence explanation of what Qwen is.")], shapes.TEXT, max_tokens=256, **_P8),
    qwen("reasoning", [user(f"{COMPARED} Explain briefly.")], shapes.THOUGHT, temperature=0.6, top_p=0.95, max_tokens=1024, **THINKING),
    qwen("stream", [HELPFUL, user("Explain Qwen in three short bullet points.")], usage=True, max_tokens=256, **STREAMED, **_P8),
    qwen("stream with reasoning", [user(COMPARED)], usage=True, reasoning=True, max_tokens=1024, **STREAMED, **THINKING),
    qwen("tools, auto", [USING_TOOLS, _HANGZHOU], shapes.CALLED, tiny=shapes.TEXT, max_tokens=512, tool_choice="auto", **ONE_CALL,
         tools=weather({"description": "City or district, such as Beijing, Hangzhou, or Yuhang District."}, _UNIT)),
    qwen("tools, required", [user("Find the current weather for Hangzhou.")], shapes.CALLED, max_tokens=512, tool_choice="required",
         tools=weather(_CITY), **ONE_CALL),
    qwen("tool result", [_HANGZHOU, *called("Hangzhou", {"weather": "cloudy", "temperature": 23, "unit": "celsius"})],
         shapes.TEXT, tiny=shapes.CALLED, max_tokens=256),
    qwen("JSON mode", [ONLY_JSON, TAGLINES], shapes.JSON_OBJECT, tiny=shapes.CUT, max_tokens=512, **JSON_MODE, **NOT_THINKING, **_P8),
    qwen("JSON schema", [BY_SCHEMA, THREE_TAGLINES], shapes.TAGLINES, tiny=shapes.CUT,
         max_tokens=512, **JSON_SCHEMA, **NOT_THINKING, **_P8),
    qwen("many parameters", [CONCISE, FIVE_NAMES], shapes.WEIGHED, top_k=20, **PENALTIES, **WEIGHED, **NOT_THINKING, **_P8),
]  # fmt: skip

GENERIC_CASES = [
    Case(
        "extra_body",
        {
            "model": DEPLOYED,
            "messages": [HELPFUL, user("Give me a one-sentence summary of vLLM.")],
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 128,
            "stream": False,
            "extra_body": {"top_k": 50, "repetition_penalty": 1.05},
        },
        shapes.TEXT,
    )
]

_INSTANCE = MOUNT + CHAT
_HELLO = user("Hello!")

INSTANCE_CASES = [
    Case("chat", {"model": INSTANCED, "messages": [HELPFUL, _HELLO]}, shapes.TEXT, path=_INSTANCE, key=None),
    Case(
        "stream",
        {"model": INSTANCED, "messages": [_HELLO], "stream": True},
        path=_INSTANCE,
        key=None,
        accept="text/event-stream",
    ),
    Case("by JavaScript's SDK", {"model": INSTANCED, "messages": [_HELLO]}, shapes.TEXT, path=_INSTANCE, key="not-needed"),
]

LIGHT_CASES = [
    Case(
        "chat",
        {"model": LIGHT, "messages": [HELPFUL, user("What is the capital of France?")], "max_tokens": 100, "temperature": 0.7},
        shapes.TEXT,
        key=None,
    ),
    Case(
        "stream",
        {"model": LIGHT, "messages": [user("Write a haiku about programming.")], "max_tokens": 50, "stream": True},
        key=None,
    ),
    Case("raw prompt", {"model": LIGHT, "prompt": "Once upon a time", "max_tokens": 100, "temperature": 0.8}, shapes.TEXT, key=None),
]


@dataclass(frozen=True, slots=True)
class SdkCall:
    """A call of ``client.chat.completions.create`` in OpenAI's SDK, by its arguments; ``mount`` is where the base URL leads."""

    name: str
    arguments: Json
    mount: str = ""

    def __str__(self) -> str:
        return self.name


_BANGKOK: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get current weather for a location",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "City name"}},
            "required": ["location"],
        },
    },
}
PERSON: Json = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
EMAIL = r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}"
START_OF_EMAIL = r"[a-zA-Z0-9._%+-]+(@[a-zA-Z0-9.-]*)?"
FEELINGS = ["positive", "negative", "neutral"]


def on_instance(name: str, messages: list[Json], **rest: Any) -> SdkCall:
    return SdkCall(f"instance, {name}", {"model": INSTANCED, "messages": messages, **rest}, MOUNT)


def on_light(name: str, messages: list[Json], **rest: Any) -> SdkCall:
    return SdkCall(f"light, {name}", {"model": LIGHT, "messages": messages, **rest})


SDK_CALLS = [
    on_instance("chat", [HELPFUL, _HELLO]),
    on_instance("stream", [user("Write a poem")], stream=True),
    on_instance("settings", [system("You are helpful."), _HELLO], temperature=0.7, max_tokens=100),
    on_instance("errors", [user("Hello")]),
    on_light("chat", [HELPFUL, user("Explain quantum computing in simple terms.")], max_tokens=150, temperature=0.7),
    on_light("stream", [user("Count to 10.")], max_tokens=50, stream=True),
    on_light("sampling", [user("Generate creative text.")], max_tokens=200, temperature=0.9, top_p=0.95, extra_body={"top_k": 50}),
]
TOOLS_CALL = on_instance("tools", [user("What's the weather in Bangkok?")], tools=[_BANGKOK], tool_choice="auto")
GUIDED_JSON = on_instance("guided_json", [user("Extract: John is 30 years old")], extra_body={"guided_json": PERSON})
GUIDED_REGEX = on_instance("guided_regex", [user("Generate an email for John")], extra_body={"guided_regex": EMAIL})
GUIDED_CHOICE = on_instance("guided_choice", [user("Is this positive or negative?")], extra_body={"guided_choice": FEELINGS})
