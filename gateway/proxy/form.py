"""A multipart form on its way to a server: the model is read from it, the rest streams on.

The rule: the form is parsed with the parser that vLLM's own framework uses, so that both sides see the same
fields, and it is parsed to its end: a second ``model`` or a forbidden field, wherever it stands, ends the request
before the server has the whole of it. What the gateway adds stands behind all others, where it is the one that counts: of several
fields of a name FastAPI takes the last (``_get_multidict_value`` in its dependencies/utils.py).
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
_TEXT_LIMIT = 18  # and a number that is checked, or a flag
_NUMBER = re.compile(rb"[0-9]{1,18}")
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")  # RFC 2046, section 5.1.1
_EXTENDED_NAME = re.compile(rb";\s*name\*", re.IGNORECASE)  # RFC 7578, section 4.2, forbids it; older parsers believe it
_DISPOSITION = b"content-disposition"
_BOUND = "max_completion_tokens"
_STREAM, _USAGE, _CONTINUOUS = "stream", "stream_include_usage", "stream_continuous_usage_stats"
_READ = NUMBERS | {_STREAM, _USAGE, _CONTINUOUS}
_TRUE = frozenset({b"1", b"on", b"t", b"true", b"y", b"yes"})  # in any case: what pydantic takes for true
_UNSAID = frozenset({b"", b"0", b"off", b"f", b"false", b"n", b"no"})  # and for false, or FastAPI for nothing
_MAX_OPTIONS = 16  # options of a Content-Type or Content-Disposition: parsing them takes quadratic time
_LONGEST_OPTIONS = 4096  # bytes of one of these
MAX_PARTS = 1000
"""Parts of a form, as many as vLLM's own framework takes."""
MAX_HEADERS = 8
"""Headers of one part."""
NextBytes = Callable[[], Awaitable[bytes]]


class Form:
    """One form. Offsets are those of the client's bytes.

    ``content_type`` is written afresh: a ``charset`` of the client's would let the server read other field names than
    those that were checked.
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
        # The part that is being read
        self._header = b""
        self._value = b""
        self._name: str | None = None
        self._disposed = False
        # The model's part
        self._model = b""
        self._span: tuple[int, int] | None = None
        self._model_read = False
        self._served = ""
        # What is checked when the model's policy is known
        self._policy: BodyPolicy | None = None
        self._most: int | None = None
        self._names: set[str] = set()
        self._numbers: list[tuple[str, bytes]] = []
        # The fields that say what is to be added: of each name the last
        self._text = b""
        self._texts: dict[str, bytes] = {}

    @classmethod
    def of(cls, content_type: bytes) -> Form:
        """A form by its Content-Type. Raises Refusal when that names no boundary."""
        boundary = _options(content_type).get(b"boundary")
        if boundary is None or not _BOUNDARY.fullmatch(boundary):
            raise Refusal("invalid_value", "The content type of a form names its boundary, of at most 70 characters.")
        return cls(boundary)

    def obey(self, policy: BodyPolicy, most: int | None = None) -> None:
        """Check what has been read, and what is to come, by the policy of the model, and by the largest answer in tokens that the key may
        have. Raises Refusal."""
        self._policy, self._most = policy, most
        _check_names(self._names, policy)
        for name, text in self._numbers:
            self._check_number(name, text, policy)

    @property
    def ended(self) -> bool:
        """The last boundary has been read."""
        return bool(self._parser.state == MultipartState.END)

    @property
    def hides_usage(self) -> bool:
        """The server was asked for a usage event that the client did not ask for."""
        return self.ended and _USAGE in self._added()

    async def read_model(self, next_bytes: NextBytes) -> str | None:
        """Read up to the end of the ``model`` field; None when the form has none. Raises Refusal for a bad form."""
        while not self._model_read:
            data = await next_bytes()
            if not data:
                return None
            self._held += data
            self._check_beginning()
            self._feed(data)
        try:
            return self._model.decode()
        except UnicodeDecodeError:
            raise Refusal("invalid_value", "The field 'model' is not valid UTF-8.", param="model") from None

    def _check_beginning(self) -> None:
        """What stands before the first boundary is read by the parser in a way that depends on how the bytes were cut."""
        if not self._first.startswith(self._held[: len(self._first)]):
            raise Refusal("invalid_value", "The form does not begin with its boundary.")

    def check_end(self) -> None:
        """All has been read. Raises Refusal where that is no whole form: what stands behind its last boundary would then be read in a way
        that depends on how the bytes were cut."""
        if not self.ended:
            raise Refusal("invalid_value", "The form does not end with its boundary.")

    def opening(self, served_model: str) -> bytes:
        """The bytes read so far, with the model's name at the server in place of the client's; without the last of them where the
        form's end is still to come."""
        self._served = served_model
        start, end = self._span or (0, 0)
        name = b"" if self._span is None else served_model.encode()
        rest = self._held[end:]
        if not self.ended:
            del rest[len(rest) - len(self._kept()) :]
        opening = bytes(self._held[:start]) + name + bytes(rest)
        return self._completed(opening) if self.ended else opening

    def _kept(self) -> bytes:
        """What of the bytes read so far may be the beginning of the last boundary: it is sent with the rest."""
        end = 0 if self._span is None else self._span[1]
        return b"" if self.ended else bytes(self._held[max(end, len(self._held) - len(self._closing)) :])

    def _completed(self, data: bytes) -> bytes:
        """The bytes in which a form's last boundary stands, with the gateway's own fields before it."""
        at = data.find(self._closing)
        if at < 0:
            return data  # a form without any part
        at += len(self._closing) - 2
        added = b"".join(
            b'\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n%b' % (name.encode(), value, self._first)
            for name, value in self._added().items()
        )
        return data[:at] + added + data[at:]

    def _added(self) -> dict[str, bytes]:
        """The gateway's own fields: the model where the form names none, usage on streams, and a bound on a response that has none."""
        texts, added = self._texts, dict[str, bytes]()
        if self._span is None:
            added["model"] = self._served.encode()
        if texts.get(_STREAM, b"").lower() in _TRUE and texts.get(_USAGE, b"").lower() in _UNSAID:
            added[_USAGE] = b"true"
            if _CONTINUOUS in texts:
                added[_CONTINUOUS] = b"false"  # without usage it has no effect
        of_model = None if self._policy is None else self._policy.max_tokens
        bounds = [bound for bound in (self._most, of_model) if bound is not None]
        if bounds and not texts.get(_BOUND):
            added[_BOUND] = b"%d" % min(bounds)
        return added

    def opening_chunk(self, served_model: str) -> bytes:
        """The same as the first chunk of a body without a length."""
        return _chunk(self.opening(served_model))

    def behind(self, length: int) -> int:
        """How many bytes of a form of the client's ``length`` follow its opening, where that has its end in it."""
        return length - len(self._held)

    def upload(self, next_bytes: NextBytes, *, chunked: bool) -> Upload:
        """Streams what comes behind the opening."""

        async def stream(send: Callable[[bytes, bool], None], drained: Callable[[], Awaitable[bool]]) -> None:
            last = self._kept()  # is kept back, so that the server has no whole form before it was seen to be one
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
        if self._delimiters > MAX_PARTS + 1:  # the last one ends the form; those that the parser takes for data cost it as much
            raise _too_many_parts()
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise Refusal("invalid_value", f"The form is not valid: {error}.") from None
        self._offset += len(data)

    # What the parser calls

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
        if b"\r" in self._model:  # the parser hands over a supposed boundary apart from the form's bytes, so its place is not known
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
        """Plain digits only: what else vLLM would take for a number is not guessed at."""
        most, of_key = policy.maximum(name), self._most if name == _BOUND else None
        if not text or (most is None and of_key is None):
            return
        number = int(text) if _NUMBER.fullmatch(text) else None
        if most is not None or number is None:
            check_number(name, number, most or 0)
        if of_key is not None and number is not None and number > of_key:
            raise Refusal("invalid_value", f"The field '{name}' may be {of_key} at most for this key.", param=name)


def _options(value: bytes) -> dict[bytes, bytes]:
    """The options of a header. Raises Refusal for more of them than a client has a use for."""
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
