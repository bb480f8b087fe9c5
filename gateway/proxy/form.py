"""A multipart form: the client's form is parsed as it arrives, and a new one is written for the server.

The rule: what is sent is what was checked. The form is parsed to its end with the parser of vLLM's own framework, and each part is written
again from what the parser reports. Only the data of parts and the content types of files are copied from the client's bytes. A second
``model`` or a forbidden field, wherever it is, ends the request before the server has the whole form. The gateway adds its fields after all
other fields, where they take precedence: FastAPI takes the last of several fields with one name (``_get_multidict_value`` in its
dependencies/utils.py).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Set

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from gateway.api.errors import invalid_value
from gateway.auth.body_policy import NUMBERS, BodyPolicy, check_number

_MODEL_LIMIT = 512  # bytes that the name of a model may have
_TEXT_LIMIT = 18  # bytes that a number that is checked, or a flag, may have
_NUMBER = re.compile(rb"[0-9]{1,18}")
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")  # RFC 2046, section 5.1.1
_FIELD_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")  # RFC 9110, section 5.5: in other readers, a line feed may end a header
_DISPOSITION, _TYPE = b"content-disposition", b"content-type"
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
    """One form.

    ``content_type`` is written by the gateway: with a ``charset`` of the client's, the server could read other field names than the
    checked ones. No part can contain the boundary that it names: 128 random bits, drawn for this form and sent to the server only.
    """

    def __init__(self, boundary: bytes) -> None:
        self._boundary = secrets.token_hex(16).encode()
        self.content_type = b"multipart/form-data; boundary=" + self._boundary
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
        # Refuse bytes before the first boundary: how the parser reads them depends on how they are split into reads.
        self._parser.state = MultipartState.START_BOUNDARY
        self._delimiter = b"\r\n--" + boundary
        self._parts = 0
        # Written and not sent: the parts before the model's, once it has been read, and the later ones
        self._before_model: bytes | bytearray | None = None
        self._written = bytearray()
        # The part that is being parsed
        self._header = b""
        self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._model = b""
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
            raise invalid_value("The content type of a form names its boundary, of at most 70 characters.")
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
        """Read up to the end of the ``model`` field and return its value; None if the form has none. Raises Refusal for an invalid form.

        If the form has ended by then, all that the client sends is read.
        """
        while self._before_model is None or self.ended:
            data = await next_bytes()
            if not data:
                break
            self._parse(data)
        if self._before_model is None:
            self._split_at_model()
            return None
        try:
            return self._model.decode()
        except UnicodeDecodeError:
            raise invalid_value("The field 'model' is not valid UTF-8.", param="model") from None

    def check_end(self) -> None:
        """Check, once all has been read, that the form is complete. Raises Refusal.

        The parser's result for bytes after a missing last boundary depends on how they are split into reads.
        """
        if not self.ended:
            raise invalid_value("The form does not end with its boundary.")

    def opening(self, served_model: str) -> bytes:
        """Return what has been read, with the model's name at the server: the whole form if it has ended."""
        model = self._field("model", served_model.encode())
        return b"".join((self._before_model or b"", model, self._written, self.ending() if self.ended else b""))

    def feed(self, data: bytes) -> bytes:
        """Parse the bytes after the opening, and return what is to be sent for them. Raises Refusal."""
        self._before_model, self._written = b"", bytearray()
        self._parse(data)
        return bytes(self._written)

    def ending(self) -> bytes:
        """Return the gateway's own fields and the last delimiter, once all has been read. Raises Refusal for an incomplete form."""
        self.check_end()
        return b"".join(self._field(name, value) for name, value in self._added().items()) + b"--%b--\r\n" % self._boundary

    def _added(self) -> dict[str, bytes]:
        """Return the gateway's own fields, aside from the model: usage on streams, and a limit on a response without one."""
        texts, added = self._texts, dict[str, bytes]()
        if texts.get(_STREAM, b"").lower() in _TRUE and texts.get(_USAGE, b"").lower() in _NOT_SET:
            added[_USAGE] = b"true"
            if _CONTINUOUS in texts:
                added[_CONTINUOUS] = b"false"  # without usage it has no effect
        model_max_tokens = None if self._policy is None else self._policy.max_tokens
        limits = [limit for limit in (self._key_max_tokens, model_max_tokens) if limit is not None]
        if limits and not texts.get(_MAX_TOKENS):
            added[_MAX_TOKENS] = b"%d" % min(limits)
        return added

    def _field(self, name: str, value: bytes) -> bytes:
        return b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (self._boundary, name.encode(), value)

    def _split_at_model(self) -> None:
        """Give the model its position: after the parts that have been written."""
        self._before_model, self._written = self._written, bytearray()

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            if not self._parts:
                raise invalid_value("The form does not begin with its boundary.") from None
            raise invalid_value(f"The form is not valid: {error}.", detail="The form is not valid.") from None

    def _count_parts(self, count: int) -> None:
        self._parts += count
        if self._parts > MAX_PARTS:
            raise invalid_value(f"The form has more than {MAX_PARTS} parts.")

    # Called by the parser

    def _part_begin(self) -> None:
        self._count_parts(1)
        self._headers = {}
        self._text = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        name = self._header.lower()
        if name in self._headers:
            raise invalid_value(f"The form has a part with two {name.decode().title()} headers.")
        if name in (_DISPOSITION, _TYPE):
            self._headers[name] = self._value
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        """Write the part's headers and check its name, as it is read from what was written."""
        given = _options(self._headers.get(_DISPOSITION, b""))
        options = {option: given[option] for option in (b"name", b"filename") if option in given}
        disposition = b"form-data" + b"".join(
            b'; %b="%b"' % (option, value.replace(b"\\", b"\\\\").replace(b'"', b'\\"')) for option, value in options.items()
        )
        if b"name" not in options or _options(disposition) != options:
            raise invalid_value("The form has a part without a plain name.")
        lines = [b"--" + self._boundary, b"Content-Disposition: " + disposition]
        if b"filename" in options and _TYPE in self._headers:  # of a text, vLLM's framework reads no other header
            lines.append(b"Content-Type: " + self._headers[_TYPE])
        if not all(map(_FIELD_VALUE.fullmatch, lines)):
            raise invalid_value("The form has a header with a control character.")
        self._name = name = options[b"name"].decode("latin-1")
        if self._policy is None:
            self._names.add(name)
        else:
            _check_names({name}, self._policy)
        if name != "model":
            self._written += b"\r\n".join((*lines, b"", b""))
        elif self._before_model is not None:
            raise invalid_value("The field 'model' was sent more than once.", param="model")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._count_parts(data.count(self._delimiter, start, end))  # a delimiter inside data costs the parser as much as a part
        if self._name == "model":
            self._model += data[start:end]
            if len(self._model) > _MODEL_LIMIT:
                raise invalid_value("The field 'model' is too long.", param="model")
            return
        self._written += data[start:end]
        if self._name in _READ:
            self._text = (self._text + data[start:end])[: _TEXT_LIMIT + 1]

    def _part_end(self) -> None:
        if self._name == "model":
            self._split_at_model()
            return
        self._written += b"\r\n"
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
            raise invalid_value(f"The field '{name}' may be {key_most} at most for this key.", param=name)


def _options(value: bytes) -> dict[bytes, bytes]:
    """Return the options of a header. Raises Refusal for more options than a client needs."""
    if len(value) > _LONGEST_OPTIONS or value.count(b";") > _MAX_OPTIONS:
        raise invalid_value(f"A form's header is longer than {_LONGEST_OPTIONS} bytes or has more than {_MAX_OPTIONS} options.")
    options: dict[bytes, bytes] = parse_options_header(value)[1]
    return options


def _check_names(names: Set[str], policy: BodyPolicy) -> None:
    refused = policy.forbidden_field(names)
    if refused is not None:
        raise invalid_value(f"The field '{refused}' is not allowed here.", param=refused)
