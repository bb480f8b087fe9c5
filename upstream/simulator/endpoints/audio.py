"""POST /v1/audio/transcriptions and /translations: multipart in, text out (speech_to_text in vLLM 0.32)."""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from starlette.datastructures import FormData, UploadFile

from upstream.simulator import errors
from upstream.simulator.endpoints import fields, usage
from upstream.simulator.endpoints.fields import Fields
from upstream.simulator.endpoints.streams import DONE, StreamShape, frame
from upstream.simulator.engine.engine import Emission
from upstream.simulator.engine.job import ApiRequest, Job, Transcript, now
from upstream.simulator.text.plan import GenerationRequest, Prompt

TOKENS_PER_SECOND = 50
_BYTES_PER_SECOND = 16000

Task = Literal["transcribe", "translate"]
_NAMES: dict[Task, str] = {"transcribe": "transcription", "translate": "translation"}


class AudioRequest(Fields):
    """The form of POST /v1/audio/transcriptions and /translations."""

    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "verbose_json", "diarized_json", "vtt"] = "json"
    seed: int | None = None
    stream: bool | None = False
    stream_include_usage: bool | None = False
    stream_continuous_usage_stats: bool | None = False
    max_completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """An uploaded file and its duration in seconds (estimated if it is not a WAV file)."""

    content: bytes
    seconds: float

    @classmethod
    async def of(cls, form: FormData) -> Recording:
        """Read the upload. Raises ApiError if it is missing or empty."""
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise errors.malformed([{"type": "missing", "loc": ("file",), "msg": "Field required", "input": {}}], ("body",))
        content = await file.read()
        if not content:
            raise errors.plain("Invalid or unsupported audio file.")
        return cls(content, _seconds(content))


def _seconds(content: bytes) -> float:
    try:
        with wave.open(io.BytesIO(content)) as sound:
            return float(sound.getnframes() / sound.getframerate())
    except (wave.Error, EOFError):
        return len(content) / _BYTES_PER_SECOND


def job(call: ApiRequest, recording: Recording, task: Task) -> Job:
    """Understand a request. Raises ApiError."""
    request = fields.read(AudioRequest, call.body)
    model = call.model()
    if request.response_format not in ("json", "text", "verbose_json"):
        raise errors.plain("Currently only support response_format: `text`, `json`, `verbose_json` or `diarized_json`")
    prompt = Prompt.of_text(f"<|im_start|>{task}\n{request.prompt}" + "\x00" * math.ceil(recording.seconds * TOKENS_PER_SECOND))
    available = call.settings.max_model_len - len(prompt.ids)
    generated = GenerationRequest((prompt,), max(1, min(available, request.max_completion_tokens or available)), seed=request.seed)
    planned, refusal = call.planned(generated)
    transcript = Transcript(planned)
    response = AudioResponse(call, request, model, transcript, recording, task)
    return Job(transcript, response, bool(request.stream), call.behavior, refusal)


class AudioResponse(StreamShape):
    """A transcription's shapes."""

    def __init__(
        self, call: ApiRequest, request: AudioRequest, model: str, transcript: Transcript, recording: Recording, task: Task
    ) -> None:
        self._request = request
        self._transcript = transcript
        self._recording = recording
        self._task = task
        name = f"{task}-{call.request_id()}"
        self._head = {"id": name, "object": f"{_NAMES[task]}.chunk", "created": now(), "model": request.model or model}
        self._at_end = call.settings.force_include_usage or bool(request.stream_include_usage)

    def step(self, emissions: list[Emission]) -> Iterator[bytes]:
        for emission in emissions:
            text = emission.token.text if emission.token else ""
            choice: dict[str, Any] = {"delta": {"content": text}}
            if emission.finish is not None:
                choice |= {"finish_reason": emission.finish, "stop_reason": emission.stop}
            running = {"usage": self._usage()} if self._at_end and self._request.stream_continuous_usage_stats else {}
            yield frame({**self._head, "choices": [choice], **running})

    def closing(self) -> Iterator[bytes]:
        if self._at_end:
            yield frame({**self._head, "choices": [], "usage": self._usage()})
        yield DONE

    def _usage(self) -> dict[str, Any]:
        return usage.counts(self._transcript.prompt_tokens, self._transcript.completion_tokens)

    def body(self) -> dict[str, Any]:
        text = self._transcript.choices[0].content
        if self._request.response_format == "verbose_json":
            return self._verbose(text)
        if self._task == "translate":
            return {"text": text}
        return {"text": text, "usage": {"type": "duration", "seconds": math.ceil(self._recording.seconds)}}

    def _verbose(self, text: str) -> dict[str, Any]:
        segment: dict[str, Any] = {
            "id": 0,
            "avg_logprob": -0.25,
            "compression_ratio": 1.0,
            "end": self._recording.seconds,
            "no_speech_prob": None,
            "seek": 0,
            "start": 0.0,
            "temperature": 0.0,
            "text": text,
            "tokens": [],
        }
        body = {"duration": self._recording.seconds, "language": self._request.language or "en", "text": text, "segments": [segment]}
        return {**body, "words": None}
