"""Record the chunks that the fast path sends, for a continuation of their stream on another server.

The rule: the fast path sends a chunk only if it has the template of its stream. So these recorders know where its text and its token IDs
are, and a chunk is recorded in the call that sends it.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.api.usage import USAGE_START
from gateway.client.request import ClientRequest
from gateway.continuation.sent_text import SentText
from gateway.continuation.token_record import TokenRecord
from gateway.proxy.event_template import TEXT, TemplateLearner
from gateway.proxy.running_usage import RunningUsage

_match_text = TEXT.match
_USAGE_START_SIZE = len(USAGE_START)


class TokenRecorder:
    """Records the token IDs of the chunks, and sends them without. ``send`` sends framed chunks to the client."""

    __slots__ = ("_learner", "_record", "_request", "_running", "_send")

    def __init__(
        self,
        record: TokenRecord,
        learner: TemplateLearner,
        request: ClientRequest,
        running: RunningUsage | None,
        send: Callable[[bytes], None],
    ) -> None:
        self._record: TokenRecord = record
        self._learner: TemplateLearner = learner
        self._request: ClientRequest = request
        self._running: RunningUsage | None = running
        self._send: Callable[[bytes], None] = send

    def write(self, chunk: bytes) -> None:
        """Record and send a chunk that has the learner's template."""
        _, _, rest, shown, usage, start_size, end_size = self._learner.recorded
        start = chunk.find(b"\n") + 1
        text_start = start + start_size
        text = _match_text(chunk, text_start)
        assert text is not None
        ids = text.end() - 1 + end_size
        found = rest.match(chunk, ids)
        assert found is not None
        if text.end() - 1 > text_start:
            self._record.add_shown(found[1], chunk[text_start : text.end() - 1])
        else:
            self._record.add_hidden(found[1])
        if usage >= 0 and self._running is not None:
            self._running.tail = chunk[found.end(1) + usage + _USAGE_START_SIZE :]
        event = chunk[start : ids - 1] + shown
        self._request.bytes_out += len(event) - (len(chunk) - start - 2)
        self._send(b"%x\r\n%b\r\n" % (len(event), event))


class TextRecorder:
    """Records the texts of the chunks. ``send`` sends framed chunks to the client."""

    __slots__ = ("_learner", "_record", "_send")

    def __init__(self, record: SentText, learner: TemplateLearner, send: Callable[[bytes], None]) -> None:
        self._record: SentText = record
        self._learner: TemplateLearner = learner
        self._send: Callable[[bytes], None] = send

    def write(self, chunk: bytes) -> None:
        """Record and send a chunk that has the learner's template."""
        learner = self._learner
        start = chunk.find(b"\n") + 1 + learner.template.start_size
        text = _match_text(chunk, start)
        if text is not None:
            self._record.note_text(learner.text, chunk[start : text.end() - 1])
        self._send(chunk)
