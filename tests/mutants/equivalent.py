"""Why no test can notice a mutant: by module, then by its definition and the source before and after. docs/mutants.md shows the reasons.

The rule: an entry is a mutant that does the same as the original. A survivor without an entry is a missing test.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Change = tuple[str, str, str]

EQUIVALENT: Mapping[str, Mapping[Change, str]] = MappingProxyType(
    {
        "gateway/client/http/head.py": {
            ("", "b'content-length'", "b'content-lengthx'"): "llhttp rejects a second Content-Length itself.",
            ("RequestHead", "False", "True"): "No code compares two of them.",
            ("RequestHead.expects_continue", "b''", "b'x'"): "Neither is `100-continue`.",
            (
                "_HeadEvents.__init__",
                "self.on_header = self.headers.setdefault",
                "pass",
            ): "A shortcut: without it, the headers are read by `_all_fields`, as repeated ones are.",
            (
                "_HeadEvents.__init__",
                "self.keep_alive = self.upgrades = False",
                "pass",
            ): "Set before they are read: without the end of the headers, the request is rejected.",
            ("_HeadEvents.__init__", "False", "True"): "Set before it is read: without the end of the headers, the request is rejected.",
            (
                "parse_head",
                "data.find(b' \\r\\n') >= 0",
                "data.find(b' \\r\\n') > 0",
            ): "A request does not start with white space, so nothing is found at the index 0.",
            ("parse_head", "0", "1"): "A request does not start with white space, so nothing is found at the index 0.",
            (
                "parse_head",
                "data.find(b'\\t\\r\\n') >= 0",
                "data.find(b'\\t\\r\\n') > 0",
            ): "A request does not start with white space, so nothing is found at the index 0.",
            (
                "parse_head",
                "len(headers) < number",
                "len(headers) <= number",
            ): "A shortcut: `_all_fields` has the same result for headers that are not repeated.",
        },
        "gateway/client/http/framing.py": {
            ("HttpParser.__init__", "self._left = 0", "pass"): "Set before it is read, with the start of a body.",
            ("HttpParser.__init__", "0", "1"): "Set before it is read, with the start of a body.",
            ("HttpParser.__init__", "False", "True"): "Set before it is read, with the first request.",
            (
                "HttpParser._is_incomplete",
                "stored.find(_HEAD_END, max(len(stored) - len(data) - len(_HEAD_END) + 1, 0)) >= 0",
                "stored.find(_HEAD_END, max(len(stored) - len(data) - len(_HEAD_END) + 1, 0)) > 0",
            ): "The stored bytes start with the request line, so neither a line feed nor the end of the headers is at the index 0.",
            (
                "HttpParser._is_incomplete",
                "len(stored) - len(data) - len(_HEAD_END) + 1",
                "len(stored) - len(data) - len(_HEAD_END) - 1",
            ): "Two bytes more are searched, in which no end was found before.",
            (
                "HttpParser._is_incomplete",
                "0",
                "1",
            ): "The stored bytes start with the request line, so neither a line feed nor the end of the headers is at the index 0.",
            ("HttpParser._is_incomplete", "return False", "return None"): "Both are false.",
            (
                "HttpParser._is_incomplete",
                "stored.find(b'\\n', 0, len(stored) - len(data)) < 0",
                "stored.find(b'\\n', 0, len(stored) - len(data)) <= 0",
            ): "The stored bytes start with the request line, so neither a line feed nor the end of the headers is at the index 0.",
            ("", "2048", "2049"): "A bound on the work of one event-loop iteration. The requests are the same.",
            ("HttpParser.feed", "end < 0", "end <= 0"): "An empty line at the index 0 was skipped before.",
            ("HttpParser.feed", "0", "1"): "An empty line at the index 0 was skipped before.",
            ("HttpParser._is_incomplete", "1", "2"): "One byte more is checked, which was valid before.",
            (
                "HttpParser._receive_request",
                "length <= AHEAD",
                "length < AHEAD",
            ): "A shortcut for a body that has arrived: the general path has the same result.",
        },
        "upstream/http/repeated_headers.py": {
            (
                "RepeatedHeaders.__init__",
                "self._before = self._digits = self._after = b''",
                "pass",
            ): "Nothing reads them before headers are remembered.",
            ("RepeatedHeaders.__init__", "b''", "b'x'"): "Nothing reads them before headers are remembered.",
            ("RepeatedHeaders.__init__", "0", "1"): "Nothing reads them before headers are remembered.",
            (
                "RepeatedHeaders._remember",
                "lower.find(_LENGTH, name + 1) > name >= 0",
                "lower.find(_LENGTH, name + 1) >= name >= 0",
            ): "The second search begins after the first name.",
            ("RepeatedHeaders._remember", "1", "2"): "A second line of this name begins several bytes after the first one.",
            ("RepeatedHeaders._remember", "b' \\t'", "b' \\tx'"): "A valid length consists of digits.",
            ("RepeatedHeaders._remember", "name >= 0", "name > 0"): "The name is after the first line, so it is not at the index 0.",
            ("RepeatedHeaders._remember", "0", "1"): "The name is after the first line, so it is not at the index 0.",
        },
        "upstream/http/connection.py": {
            ("Connection._stop_diverting", "self._diverted = False", "pass"): "Diverting is stopped again, which changes nothing.",
            ("Connection._stop_diverting", "False", "True"): "Diverting is stopped again, which changes nothing.",
            (
                "Connection._take_held",
                "held.find(_HEAD_END, max(len(held) - len(data) - len(_HEAD_END) + 1, 0)) < 0",
                "held.find(_HEAD_END, max(len(held) - len(data) - len(_HEAD_END) + 1, 0)) <= 0",
            ): "The stored bytes start with the version, so the end of the headers is not at the index 0.",
            (
                "Connection._take_held",
                "len(held) - len(data) - len(_HEAD_END) + 1",
                "len(held) - len(data) - len(_HEAD_END) - 1",
            ): "Two bytes more are searched, in which no end was found before.",
            (
                "Connection._take_held",
                "0",
                "1",
            ): "The stored bytes start with the version, so the end of the headers is not at the index 0.",
            (
                "Connection._read_head",
                "(found := data.find(_HEAD_END, start)) >= 0",
                "(found := data.find(_HEAD_END, start)) > 0",
            ): "A response that starts with an empty line is refused in both ways.",
            ("Connection._read_head", "0", "1"): "A response that starts with an empty line is refused in both ways.",
            ("Connection._read_head", "start < len(data)", "start <= len(data)"): "Nothing is added to the stored bytes.",
            ("Connection._read_head", "1", "2"): "Every negative index means that the headers are not complete.",
            ("Connection.connection_lost", "if self._diverted:", "if not self._diverted:"): "A lost connection reads nothing.",
            ("Connection.connection_lost", "self._stop_diverting()", "pass"): "A lost connection reads nothing.",
            (
                "Connection.connection_lost",
                "monotonic() - self._sent < STALE_WITHIN",
                "monotonic() - self._sent <= STALE_WITHIN",
            ): "The clock has more digits than the bound.",
            (
                "IdleConnections.pop",
                "monotonic() - since < self.max_idle",
                "monotonic() - since <= self.max_idle",
            ): "The clock has more digits than the bound.",
        },
        "gateway/proxy/form.py": {
            ("", "18", "19"): "Longer texts are not read as numbers or flags anyway.",
            ("Form.__init__", "2", "3"): "`_options` refuses a longer header.",
            ("Form.__init__", "self._name = ''", "pass"): "It is set before it is read.",
            ("Form.__init__", "self._text = b''", "pass"): "It is set before it is read.",
            ("Form.__init__", "b''", "b'x'"): "It is set before it is read.",
            ("Form.feed", "b''", "b'x'"): "Behind the opening, only whether it is None is read.",
            ("Form._added", "b''", "b'x'"): "Neither is a flag that is true.",
            ("Form._headers_finished", "b''", "b'x'"): "Neither has a name, so the part is refused.",
            ("Form._part_data", "1", "2"): "Longer texts are not read as numbers or flags anyway.",
            ("Form._check_number", "0", "1"): "A text that is not a number is refused before its bound is read.",
        },
        "upstream/http/chunked.py": {
            ("ChunkedDecoder.feed", "excess > 0", "excess >= 0"): "0 is stored either way.",
            (
                "ChunkedDecoder.feed",
                "continue",
                "pass",
            ): "The steps below are those of the next iteration, and do nothing for an empty line.",
        },
        "upstream/http/response_head.py": {
            ("ResponseHead", "False", "True"): "No code compares two of them, or makes a cycle of them.",
            ("parse_response_head", "b''", "b'x'"): "A shortcut: lower-case names are the same after `lower`.",
            (
                "parse_response_head",
                "data.find(b' \\r\\n') >= 0",
                "data.find(b' \\r\\n') > 0",
            ): "A response does not start with white space, so nothing is found at the index 0.",
            ("parse_response_head", "0", "1"): "A response does not start with white space, so nothing is found at the index 0.",
            (
                "parse_response_head",
                "data.find(b'\\t\\r\\n') >= 0",
                "data.find(b'\\t\\r\\n') > 0",
            ): "A response does not start with white space, so nothing is found at the index 0.",
            ("parse_response_head", "len(headers) + 2 < lines", "len(headers) + 2 <= lines"): "A shortcut: `_is_repeated` has the result.",
            ("parse_response_head", "len(headers) + 2", "len(headers) - 2"): "A shortcut: `_is_repeated` has the result.",
        },
        "gateway/proxy/event_template.py": {
            ("", "b'\\x00'", "b'\\x00x'"): "No text ends at a quote that is a NUL, so no event has this template.",
            ("", "1", "2"): "No text ends at a quote that is a NUL, so no event has this template.",
            ("_template", "0", "1"): "The text is not at the index 0, where `data:` is.",
            ("_template", "hidden < 0", "hidden <= 0"): "The first byte is the quote of the text, which does not start a usage.",
            ("_template", "hidden > first.start()", "hidden >= first.start()"): "A usage does not start with a digit.",
            ("_is_at", "return False", "return None"): "Both are false.",
        },
        "gateway/proxy/fast_path.py": {
            ("_size_lines", "b'\\n'", "b'\\nx'"): "No read starts with a line feed between two chunks.",
            ("_size_lines", "1", "2"): "No read starts with a line feed between two chunks.",
            ("_size_lines", "0", "1"): "No read starts with a line feed between two chunks.",
            ("fast_path.read", "hidden >= 0", "hidden > 0"): "The first byte is the quote of the text, so a usage does not start there.",
            ("fast_path.read", "0", "1"): "The first byte is the quote of the text, so a usage does not start there.",
        },
        "gateway/auth/keyring.py": {
            (
                "_is_expired",
                "time.time() >= key.expires",
                "time.time() > key.expires",
            ): "The clock would have to show the very microsecond of the expiry.",
            ("_bearer", "b'Bearer'", "b'Bearerx'"): "A shortcut: the next comparison ignores the case.",
        },
        "upstream/balancing/ejection.py": {
            ("EjectionState.expire", "return False", "return None"): "Both are false.",
        },
        "upstream/backoff.py": {
            ("", "32", "33"): "A longest pause is less than four billion first ones.",
        },
        "upstream/balancing/attempt.py": {
            ("", "16 * 1024", "16 // 1024"): "Only whether the body is copied after the headers.",
            ("", "16", "17"): "Only whether the body is copied after the headers.",
            ("", "1024", "1025"): "A bound on memory, or whether a body is copied. The bytes are the same.",
            ("UpstreamResponse", "0", "1"): "Set before it is read.",
            ("UpstreamResponse", "False", "True"): "Set before it is read.",
            ("UpstreamResponse", "b''", "b'x'"): "Set before it is read.",
            ("UpstreamResponse.on_body", "len(self.pending) > 1", "len(self.pending) >= 1"): "One read is smaller than the bound.",
            ("UpstreamResponse.on_body", "1", "2"): "Two reads are smaller than the bound.",
            (
                "UpstreamResponse.on_body",
                "sum(map(len, self.pending)) > _MAX_PENDING",
                "sum(map(len, self.pending)) >= _MAX_PENDING",
            ): "A bound on memory: one byte more or less.",
            (
                "UpstreamResponse._wake",
                "self._writable is not None and (not self._is_wanted)",
                "self._writable is not None or not self._is_wanted",
            ): "`_drained` waits again if the connection is still paused.",
            ("UpstreamResponse.check", "now > self._deadline", "now >= self._deadline"): "The clock has more digits than the bound.",
            (
                "UpstreamResponse._overdue",
                "now - self.sent_at > limits.total",
                "now - self.sent_at >= limits.total",
            ): "The clock has more digits than the bound.",
            (
                "UpstreamResponse._overdue",
                "now - self.sent_at > limits.first_byte",
                "now - self.sent_at >= limits.first_byte",
            ): "The clock has more digits than the bound.",
            (
                "UpstreamResponse._overdue",
                "now - self.last_byte_at > limits.idle",
                "now - self.last_byte_at >= limits.idle",
            ): "The clock has more digits than the bound.",
            ("Attempt.__init__", "False", "True"): "Only whether the bytes leave at once or at the end of the event-loop iteration.",
            ("Attempt._start", "len(body) < _JOIN", "len(body) <= _JOIN"): "Only whether the body is copied after the headers.",
            ("Attempt._start", "True", "False"): "The body follows in the same event-loop iteration, and nothing is read between.",
            ("Attempt._release", "self._response = None", "pass"): "A response is released twice, which changes nothing.",
            ("Attempt._may_retry", "return False", "return None"): "Both are false.",
        },
        "gateway/continuation/plan.py": {
            ("Plan", "True", "False"): "No code changes one.",
        },
        "gateway/continuation/sent_text.py": {
            ("", "16", "17"): "How much memory is reserved at a time.",
            ("", "1", "2"): "Any group that no choice has.",
        },
        "gateway/proxy/token_chunks.py": {
            ("TokenRecorder.write", "usage >= 0", "usage > 0"): "The choice is closed before the usage starts.",
        },
        "gateway/continuation/token_record.py": {
            ("_without_ids", "2", "3"): "An event ends with two line feeds, and not with three.",
        },
        "gateway/admission/reserved_slots.py": {
            ("AdaptiveSlots.bound", "self._ceiling > most", "self._ceiling >= most"): "The ceiling is this number already.",
            ("ModelSlots.apply", "1", "2"): "Without servers, one slot is open for a limit of one or two.",
            ("ReservedSlots.tick", "now >= self._decide_at", "now > self._decide_at"): "The clock has more digits than the bound.",
        },
        "gateway/admission/fair_queue.py": {
            ("Flow.__init__", "self.tag = 0.0", "pass"): "Set before it is read.",
            ("Flow.earlier", "since < 2 * PAUSE", "since <= 2 * PAUSE"): "The clock has more digits than the bound.",
            (
                "Flow.order_by_deadline",
                "2 * len(self.requests) + _SPARE",
                "2 * len(self.requests) - _SPARE",
            ): "Only when entries that are out of date are freed.",
        },
        "upstream/balancing/retry_budget.py": {
            ("RetryBudget.try_spend", "(now - self._since) / INTERVAL", "(now - self._since) * INTERVAL"): "The interval is one second.",
        },
        "gateway/api/settlement.py": {
            ("Settlement", "False", "True"): "Only whether the garbage collector follows the object.",
        },
        "gateway/proxy/response.py": {
            ("ResponseRelay.lacks_prompt", "return False", "return None"): "Both are false.",
            (
                "ResponseRelay._delivery",
                "return Delivery(status, self.usage)",
                "return None",
            ): "All subclasses that have a response override it.",
            (
                "EventRelay.estimate_prompt",
                "self.usage is None and self.gaps is not None",
                "self.usage is None or self.gaps is not None",
            ): "A shortcut: with a usage, or without an event, the estimate is not used.",
        },
        "gateway/proxy/context.py": {
            ("RequestContext.needs_prompt_count", "return False", "return None"): "Both are false.",
        },
        "gateway/limits/redis/admit.lua": {
            (
                "",
                "local longest, refusing_holder, refusing_limit, left = -1, 0, 0, 0",
                "local longest, refusing_holder, refusing_limit, left = -1, 0, 1, 0",
            ): "Nothing reads the number of a limit without a holder that refuses.",
            (
                "",
                "redis.call('EXPIRE', KEYS[2 * i], math.ceil(lease_seconds) + 1)",
                "redis.call('EXPIRE', KEYS[2 * i], math.floor(lease_seconds) + 1)",
            ): "Only when a set without leases is freed.",
            (
                "",
                "redis.call('EXPIRE', KEYS[2 * i], math.ceil(lease_seconds) + 1)",
                "redis.call('EXPIRE', KEYS[2 * i], math.ceil(lease_seconds) + 2)",
            ): "Only when a set without leases is freed.",
        },
        "gateway/limits/redis/common.lua": {
            (
                "",
                "local LIFETIMES = {day = 3 * 86400, week = 21 * 86400, month = 70 * 86400, session = 86400}",
                "local LIFETIMES = {day = 3 * 86401, week = 21 * 86400, month = 70 * 86400, session = 86400}",
            ): "Only when an unused hash is freed.",
            (
                "read_period",
                "return {number = tonumber(values[i] or 0), tokens = tonumber(values[i + 1] or 0), cost = tonumber(values[i + 2] or 0)}",
                "return {number = tonumber(values[i] or 0), tokens = tonumber(values[i + 1] or 1), cost = tonumber(values[i + 2] or 0)}",
            ): "A period without tokens has no number, and counts for nothing.",
            (
                "append_counts",
                "append(reply, tokens, cost, math.ceil(seconds_until_unused(window) * 1000))",
                "append(reply, tokens, cost, math.floor(seconds_until_unused(window) * 1000))",
            ): "A rounding error of a millisecond, in a time that is shown in seconds.",
            (
                "write_holder",
                "local values, lifetime = {}, math.ceil(math.max(holder.r - now, holder.t - now, 0)) + 120",
                "local values, lifetime = {}, math.ceil(math.max(holder.r - now, holder.t - now, 1)) + 120",
            ): "Only when an unused hash is freed.",
            (
                "write_holder",
                "local values, lifetime = {}, math.ceil(math.max(holder.r - now, holder.t - now, 0)) + 120",
                "local values, lifetime = {}, math.ceil(math.max(holder.r - now, holder.t - now, 0)) + 121",
            ): "Only when an unused hash is freed.",
        },
        "gateway/limits/redis/open.lua": {
            (
                "",
                "redis.call('EXPIRE', set, 60)",
                "redis.call('EXPIRE', set, 61)",
            ): "Only when a set that is deleted two lines later would be freed.",
            (
                "",
                "redis.call('EXPIRE', store, 70 * 86400)",
                "redis.call('EXPIRE', store, 71 * 86400)",
            ): "Only when a store without counts is forgotten.",
        },
        "gateway/limits/redis/renew.lua": {
            (
                "",
                "if now <= tonumber(ARGV[2]) then",
                "if now < tonumber(ARGV[2]) then",
            ): "The clock has more digits than the bound.",
            (
                "",
                "redis.call('EXPIRE', key, math.ceil(tonumber(ARGV[1])) + 1)",
                "redis.call('EXPIRE', key, math.floor(tonumber(ARGV[1])) + 1)",
            ): "Only when a set without leases is freed.",
        },
        "gateway/limits/decision.py": {
            ("admit", "workers > 1", "workers >= 1"): "The sum over one worker is its number.",
            ("admit", "full > now", "full >= now"): "Both branches have the same number then.",
            (
                "admit",
                "holder.windows and (amounts.tokens or amounts.cost)",
                "holder.windows or (amounts.tokens or amounts.cost)",
            ): "A shortcut: without windows or amounts nothing is added.",
            ("settle", "cost < window.cost_ahead", "cost <= window.cost_ahead"): "Both branches have the same number then.",
            ("remaining_in_bucket", "left > 0", "left >= 0"): "Both branches have the same number then.",
            ("_settle_bucket", "full > now", "full >= now"): "Both branches have the same number then.",
            ("_settle_bucket", "given > 0", "given >= 0"): "Nothing is given then.",
            ("BucketState", "True", "False"): "No code changes one.",
        },
        "gateway/limits/shared_counts.py": {
            ("Buckets.__init__", "0", "1"): "Control numbers its announcements, from any number on.",
            ("Buckets.full_times", "holder.offset + REQUESTS", "holder.offset - REQUESTS"): "`REQUESTS` is 0.",
            ("Buckets.rates", "offset + REQUESTS", "offset - REQUESTS"): "`REQUESTS` is 0.",
            ("Buckets.close", "self.fd >= 0", "self.fd > 0"): "The descriptor 0 is the standard input.",
        },
        "gateway/limits/windows.py": {
            ("", "1", "2"): "One more slot of a ring, which stays empty.",
            ("Moment", "False", "True"): "Only whether the garbage collector follows the object.",
            ("Moment", "True", "False"): "No code changes one.",
            ("Window", "False", "True"): "Only whether the garbage collector follows the object.",
            (
                "hard_capacity",
                "window.tokens - taken < tokens_left",
                "window.tokens - taken <= tokens_left",
            ): "The smaller of equal numbers is the same.",
            ("settlement", "tokens < window.tokens_ahead", "tokens <= window.tokens_ahead"): "Both branches have the same number then.",
            ("BudgetState", "False", "True"): "Only whether the garbage collector follows the object.",
        },
        "gateway/limits/end_users.py": {
            ("counted_name", "break", "pass"): "Another round leaves the text as it is.",
        },
        "gateway/limits/user_limits.py": {
            ("", "1000", "1001"): "A bound of memory. The limits are the same.",
        },
        "gateway/limits/user_table.py": {
            ("UserTable._offset", "2", "3"): "One more cell of a record, which stays empty.",
            ("", "1024", "1025"): "One more entry of the log.",
            (
                "UserTable._assign",
                "cells[self._buckets.number_cell(self._holder(index)) + 1] = 0.0",
                "pass",
            ): "Counts get a new end user only after that time, and a later one at once.",
            ("UserTable._is_used", "offset + REQUESTS", "offset - REQUESTS"): "The cell of requests is the first of a holder.",
            (
                "UserTable._is_used",
                "cells[number + 1] > at.now",
                "cells[number + 1] >= at.now",
            ): "The clock has more digits than the bound.",
            ("UserTable._free", "index + 1", "index - 1"): "The search goes through the end users in the other direction.",
            ("_number_of", "1", "2"): "Any number but 0, which a float64 still holds exactly.",
        },
        "gateway/limits/lease.py": {
            ("Lease", "False", "True"): "No code compares two.",
            ("Lease", "0", "1"): "`__post_init__` sets it.",
            ("Lease.admit", "requests < smallest[0]", "requests <= smallest[0]"): "The smaller of equal numbers is the same.",
            ("Lease.admit", "cost < smallest[2]", "cost <= smallest[2]"): "The smaller of equal numbers is the same.",
            ("Lease.settle", "return False", "return None"): "Both are false.",
            ("", "62", "63"): "Both are more than any amount.",
        },
        "gateway/limits/limiter.py": {
            ("Limiter.__init__", "8", "9"): "The length of a random name.",
            ("Limiter.__init__", "self.warn_at = 1.0", "pass"): "A snapshot sets it before the first request.",
            ("Limiter.reported_capacity.used", "until > now", "until >= now"): "The clock has more digits than the bound.",
            ("Limiter.states", "True", "False"): "Both have the same length.",
            ("Limiter._counts_in_store", "True", "False"): "Both have the same length.",
        },
    }
)
