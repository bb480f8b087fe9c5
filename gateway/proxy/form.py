"""A multipart form on its way to a server: the model is read from it, and the rest is streamed.

The rule: the form is parsed to its end, with the parser that vLLM's own framework uses, so that both sides see the same fields. A second
``model`` or a forbidden field, wherever it is, ends the request before the server has the whole form. The gateway adds its fields after all
other fields, where they take precedence: FastAPI takes the last of several fields with one name (``_get_multidict_value`` in its
dependencies/utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Set

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from gateway.api.errors import Refusal
from gateway.auth.body_policy import NUMBERS, BodyPolicy, check_number
from upstream.balancing.attempt import Upload

_MODEL_LIMIT = 512  # bytes that the name of a model may have
_TEXT_LIMIT = 18  # bytes that a number that is checked, or a flag, may have
_NUMBER = re.compile(rb"[0-9]{1,18}")
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")  # RFC 2046, section 5.1.1
_EXTENDED_NAME = re.compile(rb";\s*name\*", re.IGNORECASE)  # RFC 7578, section 4.2, forbids it, but older parsers use it
_DISPOSITION = b"content-disposition"
_MAX_TOKENS = "max_completion_tokens"
_STREAM, _USAGE, _CONTINUOUS = "stream", "stream_include_usage", "stream_continuous_usage_stats"
_READ = NUMBERS | {_STREAM, _USAGE, _CONTINUOUS}
_TRUE = frozenset({b"1", b"on", b"t", b"true", b"y", b"yes"})  # in lower case: the values that pydantic reads as true
_NOT_SET = frozenset({b"", b"0", b"off", b"f", b"false", b"n", b"no"})  # the values that pydantic reads as false, or FastAPI as absent
_MAX_OPTIONS = 16  # options of a Content-Type or Content-Disposition: parsing them takes quadratic time
_LONGEST_OPTIONS = 4096  # bytes of such a header
MAX_PARTS = 1000
"""Parts of a form; vLLM's own framework accepts as many."""
MAX_HEADERS = 8
"""Headers of one part."""
NextBytes = Callable[[], Awaitable[bytes]]


class Form:
    """One form. Offsets count the client's bytes.

    ``content_type`` is written by the gateway: with a ``charset`` of the client's, the server could read other field names than the
    checked ones.
    """

    def __init__(self, boundary: bytes) -> None:
        self.content_type = b'multipart/form-data; boundary="%b"' % boundary
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=_LONGEST_OPTIONS + len(_DISPOSITION) + 2,
        )
        self._delimiters = 0
        self._tail = b""
        self._first = b"--" + boundary
        self._delimiter = b"\r\n" + self._first
        self._closing = b"\r\n--%b--" % boundary
        self._held = bytearray()
        self._offset = 0
        self._parts = 0
        # The part that is being parsed
        self._header = b""
        self._value = b""
        self._name: str | None = None
        self._disposed = False
        # The model's part
        self._model = b""
        self._span: tuple[int, int] | None = None
        self._model_read = False
        self._served = ""
        # Checked when the model's policy is known
        self._policy: BodyPolicy | None = None
        self._key_max_tokens: int | None = None
        self._names: set[str] = set()
        self._numbers: list[tuple[str, bytes]] = []
        # The fields that decide what is added; the last one of each name
        self._text = b""
        self._texts: dict[str, bytes] = {}

    @classmethod
    def of(cls, content_type: bytes) -> Form:
        """Create a form from its Content-Type. Raises Refusal if that has no boundary."""
        boundary = _options(content_type).get(b"boundary")
        if boundary is None or not _BOUNDARY.fullmatch(boundary):
            raise Refusal("invalid_value", "The content type of a form names its boundary, of at most 70 characters.")
        return cls(boundary)

    def apply_policy(self, policy: BodyPolicy, key_max_tokens: int | None = None) -> None:
        """Check the fields that have been read, and each later field, against the model's policy. Raises Refusal.

        ``key_max_tokens``: the tokens that a response for this key may have.
        """
        self._policy, self._key_max_tokens = policy, key_max_tokens
        _check_names(self._names, policy)
        for name, text in self._numbers:
            self._check_number(name, text, policy)

    @property
    def ended(self) -> bool:
        """Whether the last boundary has been read."""
        return bool(self._parser.state == MultipartState.END)

    @property
    def hides_usage(self) -> bool:
        """Whether the gateway requests a usage event that the client did not request."""
        return self.ended and _USAGE in self._added()

    async def read_model(self, next_bytes: NextBytes) -> str | None:
        """Read up to the end of the ``model`` field and return its value; None if the form has none. Raises Refusal for an invalid form."""
        while not self._model_read:
            data = await next_bytes()
            if not data:
                return None
            self._held += data
            self._check_start()
            self._feed(data)
        try:
            return self._model.decode()
        except UnicodeDecodeError:
            raise Refusal("invalid_value", "The field 'model' is not valid UTF-8.", param="model") from None

    def _check_start(self) -> None:
        """Check that the form starts with its boundary: how the parser reads bytes before it depends on how they are split into reads."""
        if not self._first.startswith(self._held[: len(self._first)]):
            raise Refusal("invalid_value", "The form does not begin with its boundary.")

    def check_end(self) -> None:
        """Check, once all has been read, that the form is complete. Raises Refusal.

        The parser's result for bytes after a missing last boundary depends on how they are split into reads.
        """
        if not self.ended:
            raise Refusal("invalid_value", "The form does not end with its boundary.")

    def opening(self, served_model: str) -> bytes:
        """Return the bytes read so far, with the model's name at the server in place of the client's name.

        If the form's end has not been read, the last bytes are held back.
        """
        self._served = served_model
        start, end = self._span or (0, 0)
        name = b"" if self._span is None else served_model.encode()
        rest = self._held[end:]
        if not self.ended:
            del rest[len(rest) - len(self._held_back()) :]
        opening = bytes(self._held[:start]) + name + bytes(rest)
        return self._completed(opening) if self.ended else opening

    def _held_back(self) -> bytes:
        """Return the bytes read so far that may be a part of the last boundary. They are sent with the rest."""
        end = 0 if self._span is None else self._span[1]
        return b"" if self.ended else bytes(self._held[max(end, len(self._held) - len(self._closing)) :])

    def _completed(self, data: bytes) -> bytes:
        """Return the bytes that contain the form's last boundary, with the gateway's own fields before it."""
        at = data.find(self._closing)
        if at < 0:
            return data  # a form without parts
        at += len(self._closing) - 2
        added = b"".join(
            b'\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n%b' % (name.encode(), value, self._first)
            for name, value in self._added().items()
        )
        return data[:at] + added + data[at:]

    def _added(self) -> dict[str, bytes]:
        """Return the gateway's own fields: the model if the form has none, usage on streams, and a limit on a response without one."""
        texts, added = self._texts, dict[str, bytes]()
        if self._span is None:
            added["model"] = self._served.encode()
        if texts.get(_STREAM, b"").lower() in _TRUE and texts.get(_USAGE, b"").lower() in _NOT_SET:
            added[_USAGE] = b"true"
            if _CONTINUOUS in texts:
                added[_CONTINUOUS] = b"false"  # without usage it has no effect
        model_max_tokens = None if self._policy is None else self._policy.max_tokens
        limits = [limit for limit in (self._key_max_tokens, model_max_tokens) if limit is not None]
        if limits and not texts.get(_MAX_TOKENS):
            added[_MAX_TOKENS] = b"%d" % min(limits)
        return added

    def opening_chunk(self, served_model: str) -> bytes:
        """Return ``opening`` as the first chunk of a body without a length."""
        return _chunk(self.opening(served_model))

    def remaining(self, length: int) -> int:
        """Return how many bytes of a form of ``length`` bytes follow the opening, if the form's end has been read."""
        return length - len(self._held)

    def upload(self, next_bytes: NextBytes, *, chunked: bool) -> Upload:
        """Return a function that streams the bytes after the opening."""

        async def stream(send: Callable[[bytes, bool], None], drained: Callable[[], Awaitable[bool]]) -> None:
            last = self._held_back()  # so that the server does not have the whole form before the gateway has checked it
            keep, had_ended = len(self._closing), self.ended
            while data := await next_bytes():
                self._feed(data)
                data = last + data
                if self.ended and not had_ended:
                    data, had_ended = self._completed(data), True
                data, last = data[:-keep], data[-keep:]
                send(_chunk(data) if chunked and data else data, True)
                if not await drained():
                    return
            self.check_end()
            send((_chunk(last) if last else b"") + b"0\r\n\r\n" if chunked else last, False)

        return stream

    def _feed(self, data: bytes) -> None:
        near = self._tail + data
        self._delimiters += near.count(self._delimiter)
        self._tail = near[-len(self._delimiter) + 1 :]
        if self._delimiters > MAX_PARTS + 1:  # the last one ends the form; a delimiter inside data costs the parser as much
            raise _too_many_parts()
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise Refusal("invalid_value", f"The form is not valid: {error}.") from None
        self._offset += len(data)

    # Called by the parser

    def _part_begin(self) -> None:
        self._name = None
        self._disposed = False
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _too_many_parts()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.startswith(b"--"):
            raise Refusal("invalid_value", "The form has a header that looks like a boundary.")
        if self._header.lower() == _DISPOSITION:
            if self._disposed:
                raise Refusal("invalid_value", "The form has a part with two Content-Disposition headers.")
            self._disposed = True
            options = _options(self._value)
            name = None if _EXTENDED_NAME.search(self._value) else options.get(b"name")
            self._name = None if name is None else name.decode("latin-1")
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        if self._name is None:
            raise Refusal("invalid_value", "The form has a part without a plain name.")
        self._text = b""
        if self._policy is None:
            self._names.add(self._name)
        else:
            _check_names({self._name}, self._policy)
        if self._name == "model" and self._model_read:
            raise Refusal("invalid_value", "The field 'model' was sent more than once.", param="model")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name in _READ:
            self._text = (self._text + data[start:end])[: _TEXT_LIMIT + 1]
        if self._name != "model":
            return
        self._model += data[start:end]
        if b"\r" in self._model:  # the parser reports a supposed boundary separately, so its offset is not known
            raise Refusal("invalid_value", "The field 'model' must be one line.", param="model")
        first = self._offset + start if self._span is None else self._span[0]
        self._span = (first, self._offset + end)
        if len(self._model) > _MODEL_LIMIT:
            raise Refusal("invalid_value", "The field 'model' is too long.", param="model")

    def _part_end(self) -> None:
        self._model_read = self._model_read or self._name == "model"
        if self._name not in _READ:
            return
        self._texts[self._name] = self._text
        if self._name not in NUMBERS:
            return
        if self._policy is None:
            self._numbers.append((self._name, self._text))
        else:
            self._check_number(self._name, self._text, self._policy)

    def _check_number(self, name: str, text: bytes, policy: BodyPolicy) -> None:
        """Check a number against the policy and the key's limit. Only plain digits are accepted: vLLM's other notations are not guessed."""
        most, key_most = policy.maximum(name), self._key_max_tokens if name == _MAX_TOKENS else None
        if not text or (most is None and key_most is None):
            return
        number = int(text) if _NUMBER.fullmatch(text) else None
        if most is not None or number is None:
            check_number(name, number, most or 0)
        if key_most is not None and number is not None and number > key_most:
            raise Refusal("invalid_value", f"The field '{name}' may be {key_most} at most for this key.", param=name)


def _options(value: bytes) -> dict[bytes, bytes]:
    """Return the options of a header. Raises Refusal for more options than a client needs."""
    if len(value) > _LONGEST_OPTIONS or value.count(b";") > _MAX_OPTIONS:
        raise Refusal("invalid_value", f"A form's header is longer than {_LONGEST_OPTIONS} bytes or has more than {_MAX_OPTIONS} options.")
    options: dict[bytes, bytes] = parse_options_header(value)[1]
    return options


def _too_many_parts() -> Refusal:
    return Refusal("invalid_value", f"The form has more than {MAX_PARTS} parts.")


def _check_names(names: Set[str], policy: BodyPolicy) -> None:
    refused = policy.forbidden_field(names)
    if refused is not None:
        raise Refusal("invalid_value", f"The field '{refused}' is not allowed here.", param=refused)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
