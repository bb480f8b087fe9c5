"""Train a tiny chat model until it has memorized DIALOGUES, and write its weights to models/.

    .venv-vllm/bin/python -m tests.vllm.make_tiny_model --architecture qwen3 --out tests/vllm/models/qwen3

Nothing is downloaded. About two minutes on two cores, 2 MB. The rule: every seed is fixed and every random draw keeps its place, so that a
second run on the same kind of processor, with the same libraries, gives the same bytes; a model that has not learned all of it is never
written.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch  # type: ignore[import-not-found]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-not-found]
from transformers import (  # type: ignore[import-not-found]
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.vllm.dialogues import (
    DIALOGUES,
    DIE,
    DONT_KNOW,
    ENDLESS,
    FALLBACK,
    PROMPT_AND_CONTINUATION,
    TOOLSETS,
    Architecture,
    Dialogue,
    Json,
    exchanges,
    user,
    weather_call,
)

TEMPLATES = Path(__file__).resolve().parent / "templates"
VOCABULARY = 640
STEPS = 800
LEARNING_RATE = 4e-3
MEMORIZED = 0.7  # the minimum probability of a memorized token: far above the probability of any other token
NO_LOSS = -100  # PyTorch's marker for a target without loss

# Unknown prompts consist of known words, or of letters of one of these alphabets.
PROMPT_TERMS = "the a tell me about how what why is of my city model number red blue please Hello write code Hi weather 7 42 +".split()  # noqa: SIM905 - a list of words reads best as words
ALPHABETS = ["abcdefghijklmnopqrstuvwxyz", "abcdefghijklmnopqrstuvwxyz0123456789.?!", "你好天气是什么éü😀"]


@dataclass(frozen=True, slots=True)
class Family:
    """The differences between the architectures. vLLM removes special tokens from texts; its qwen3 parsers need the other tokens."""

    special: tuple[str, ...]
    plain: tuple[str, ...]
    end_of_turn: str
    prefix: str | None
    config: Any
    model: Any


FAMILIES: dict[Architecture, Family] = {
    "qwen3": Family(
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        plain=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        end_of_turn="<|im_end|>",
        prefix=None,
        config=Qwen3Config,
        model=Qwen3ForCausalLM,
    ),
    "llama": Family(
        special=(
            "<|end_of_text|>",
            "<|begin_of_text|>",
            "<|eot_id|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|python_tag|>",
        ),
        plain=(),
        end_of_turn="<|eot_id|>",
        prefix="<|begin_of_text|>",
        config=LlamaConfig,
        model=LlamaForCausalLM,
    ),
}


class Sample(NamedTuple):
    """One training text in tokens. The targets of the prompt are NO_LOSS."""

    tokens: list[int]
    targets: list[int]


# The tokenizer


def make_tokenizer(architecture: Architecture) -> Any:
    """Train a byte-level BPE tokenizer on the ASCII texts only. Chinese and emoji stay one token a byte and cross token boundaries."""
    family, template = FAMILIES[architecture], (TEMPLATES / f"{architecture}.jinja").read_text()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*family.special, *family.plain],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator([*ascii_texts(), *PROMPT_AND_CONTINUATION, FALLBACK, "\n" + template], trainer)
    raw = json.loads(bpe.to_str())
    for token in raw["added_tokens"]:
        token["special"] = token["content"] in family.special
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(raw)),
        eos_token=family.end_of_turn,
        pad_token=family.special[0],
        bos_token=family.prefix,
        model_max_length=32768,
    )
    tokenizer.chat_template = template
    return tokenizer


def ascii_texts() -> Iterator[str]:
    """Return the dialogues and tools that are pure ASCII, as JSON."""
    rows = [[each.messages, int(each.with_tools), each.reasoning, each.content, each.content_without_thinking] for each in DIALOGUES]
    for row in [*rows, *TOOLSETS]:
        if (text := json.dumps(row, ensure_ascii=False)).isascii():
            yield text


# The texts


@dataclass(frozen=True, slots=True)
class Writer:
    """Write dialogues in the form that the served model reads and continues, token by token."""

    tokenizer: Any
    architecture: Architecture

    def fixed(self) -> Iterator[Sample]:
        """Return the memorized texts."""
        yield self.sample(PROMPT_AND_CONTINUATION[0], PROMPT_AND_CONTINUATION[1] + self.end_of_turn)
        for each in exchanges(self.architecture):
            response = each.dialogue.content_when(thinking=each.thinking)
            yield self.message(each.dialogue.messages, each.tools, each.dialogue.reasoning if each.thinking else None, response)

    def varied(self, rng: random.Random) -> Iterator[Sample]:
        """Return unknown prompts for one step, with the fallback response, and sometimes with the response under a grammar."""
        thinking = self.thinks and rng.random() < 0.5
        for _ in range(5):
            yield self.unknown(rng, thinking=thinking)
            thinking ^= self.thinks
        for _ in range(2):
            yield self.message([user("Roll a die.")], [], "I roll it." if thinking else None, rng.choices(list(DIE), list(DIE.values()))[0])
        if self.thinks and rng.random() < 0.15:
            yield self.under_grammar(rng)

    def unknown(self, rng: random.Random, *, thinking: bool) -> Sample:
        """Return a prompt that is not memorized, sometimes with the call that tool_choice "required" forces."""
        messages = [{"role": "system", "content": made_up(rng)}] * rng.randint(0, 1) + [user(made_up(rng))]
        tools = rng.choice([[], [], rng.choice(TOOLSETS)])
        reasoning = DONT_KNOW if thinking else None
        if tools and rng.random() < 0.1:
            return self.message(messages, tools, reasoning, [weather_call("Hangzhou", 1)], gap="")
        return self.message(messages, tools, reasoning, FALLBACK)

    def under_grammar(self, rng: random.Random) -> Sample:
        """Return the same responses without the blank line after </think>, which a grammar (JSON, a forced tool call) forbids."""
        each = rng.choice([each for each in DIALOGUES if is_structured(each)])
        tools = rng.choice(TOOLSETS) if each.with_tools else []
        return self.message(each.messages, tools, each.reasoning, each.content, gap="")

    def message(
        self, messages: list[Json], tools: list[Json], reasoning: str | None, response: str | list[Json], gap: str = "\n\n"
    ) -> Sample:
        """Return one turn of a conversation, with the prompt exactly as vLLM renders it. `reasoning` None: the model does not think."""
        prompt = self.tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True, enable_thinking=reasoning is not None
        )
        text = response if isinstance(response, str) else self.calls(response)
        thought = "" if reasoning is None else f"{reasoning}\n</think>{gap}"
        return self.sample(prompt, thought + text + ("" if response == ENDLESS else self.end_of_turn))

    def calls(self, calls: list[Json]) -> str:
        """Return tool calls in the syntax of the architecture's parser (qwen3_coder, llama3_json)."""
        functions = [each["function"] for each in calls]
        if self.architecture == "llama":
            return "; ".join(json.dumps({"name": each["name"], "parameters": each["arguments"]}) for each in functions)
        return "\n".join(qwen3_call(each["name"], each["arguments"]) for each in functions)

    def sample(self, prompt: str, completion: str) -> Sample:
        """Return the tokens of the prompt and the completion, with loss on the completion only."""
        before, after = (self.tokenizer.encode(text, add_special_tokens=False) for text in (prompt, completion))
        return Sample(before + after, [NO_LOSS] * len(before) + after)

    @property
    def end_of_turn(self) -> str:
        return FAMILIES[self.architecture].end_of_turn

    @property
    def thinks(self) -> bool:
        return self.architecture == "qwen3"


def qwen3_call(name: str, arguments: Json) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def is_structured(dialogue: Dialogue) -> bool:
    """Return whether the response is JSON or tool calls."""
    return not isinstance(dialogue.content, str) or dialogue.content.startswith("{")


def made_up(rng: random.Random) -> str:
    """Return a text that is similar to a known prompt, or random words, and must not be treated as a known prompt."""
    texts: list[str] = rng.choice(DIALOGUES).messages[-1]["content"].split()
    if rng.random() < 0.7:
        pool = rng.choice([PROMPT_TERMS, texts, [made_up_name(rng) for _ in range(5)], [made_up_name(rng)]])
        texts = rng.choices(pool, k=int(2 ** rng.uniform(0, 5)))
    texts[rng.randrange(len(texts))] = rng.choice([made_up_name(rng), rng.choice(PROMPT_TERMS)])
    return " ".join(texts)


def made_up_name(rng: random.Random) -> str:
    letters = rng.choice(ALPHABETS)
    return "".join(rng.choices(letters, k=rng.randint(1, 8)))


# The training


def make_model(architecture: Architecture, tokenizer: Any) -> Any:
    """Return new weights: two layers of width 128, 476,032 parameters."""
    family = FAMILIES[architecture]
    config = family.config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        head_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    return family.model(config)


def batch(samples: list[Sample]) -> tuple[Any, Any]:
    """Return tokens and targets as two matrices, padded on the right. The causal mask makes an attention mask unnecessary."""
    width = max(len(each.tokens) for each in samples)
    tokens = [each.tokens + [0] * (width - len(each.tokens)) for each in samples]
    targets = [each.targets + [NO_LOSS] * (width - len(each.targets)) for each in samples]
    return torch.tensor(tokens), torch.tensor(targets)


def train(model: Any, writer: Writer, fixed: list[Sample], rng: random.Random) -> None:
    """Train. Each step uses ten of the fixed dialogues and some varied dialogues."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    for _ in range(STEPS):
        samples = sorted([*rng.sample(fixed, 10), *writer.varied(rng)], key=lambda each: len(each.tokens))
        total = sum(target != NO_LOSS for each in samples for target in each.targets)
        for part in samples[:8], samples[8:]:  # short and long samples separately: less padding
            (summed_loss(model, *batch(part)) / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def summed_loss(model: Any, tokens: Any, targets: Any) -> Any:
    logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, targets[:, 1:].flatten(), reduction="sum")


def least_probability(model: Any, fixed: list[Sample]) -> float:
    """Return the lowest probability of all memorized tokens."""
    with torch.no_grad():
        return min(float(worst_token(model, *batch([each]))) for each in fixed)


def worst_token(model: Any, tokens: Any, targets: Any) -> Any:
    probabilities, wanted = model(input_ids=tokens).logits.softmax(-1)[0, :-1], targets[0, 1:]
    return probabilities[torch.arange(len(wanted)), wanted.clamp(min=0)][wanted != NO_LOSS].min().item()


def main() -> None:
    """Train one model and write it. Exit with 1 if it has not learned everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=get_args(Architecture), default="qwen3")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    rng, start = random.Random(0), time.monotonic()
    tokenizer = make_tokenizer(arguments.architecture)
    model = make_model(arguments.architecture, tokenizer)
    writer = Writer(tokenizer, arguments.architecture)
    fixed = list(writer.fixed())
    print(f"{len(fixed)} dialogues, {sum(len(each.tokens) for each in fixed)} tokens, {model.num_parameters()} parameters", flush=True)
    train(model, writer, fixed, rng)
    least = least_probability(model, fixed)
    print(f"least probability of a memorized token: {least:.3f}; {time.monotonic() - start:.0f} s")
    if least < MEMORIZED:
        raise SystemExit("not memorized: raise STEPS")
    tokenizer.save_pretrained(arguments.out)
    model.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
