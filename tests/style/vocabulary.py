"""The vocabulary: words and phrases that the project does not use, each with its replacement.

``NAMES`` applies to the words of identifiers, file names and headings. ``WHOLE_NAMES`` applies to complete identifiers.
``PHRASES`` and ``OPENINGS`` apply to prose: documents, docstrings, comments, messages, and the names of tests read as sentences.
An ordinary word is in ``NAMES`` only, so that it can still be used inside a sentence.
"""

from __future__ import annotations

from typing import NamedTuple

NAMES: dict[str, str] = {
    "answer answers answered answering": "response, reply",
    "ask asks asked asking asker": "request, query; requested",
    "tell tells told telling": "report, send, notify; reported, sent, expected",
    "word words": "message, text, term, header, token",
    "said": "text, message, reported",
    "heard": "received, acknowledged",
    "story stories": "request handler, InlineTask",
    "picture": "view, snapshot",
    "book books keybook": "recorder, usage recording; key file",
    "lane": "fast path",
    "parting leaving leaver leavers": "draining; disconnecting",
    "beginning beginnings": "prefix, start",
    "look looks looked looking": "poll, probe, scan, check, inspect",
    "kept": "stored, cached, retained, idle",
    "house": "concurrency limit",
    "member members": "field, fields",
    "generation generations": "version (of a snapshot)",
    "place places": "queue slot, server slot, config path, position",
    "room rooms lobby": "queue, queues, capacity",
    "ticket tickets": "in-flight slot",
    "turn turns": "event-loop iteration, batch, round",
    "outlet": "write batch",
    "board scoreboard": "shared counters",
    "keeper": "shim",
    "away resting": "out of rotation",
    "patience patient": "timeout",
    "anew afresh": "again",
    "head heads": "headers, request line and headers, prefix",
    "stranger strangers": "unauthenticated client",
    "whoever who whom nobody somebody everybody anybody he his him": "client, user, request, process",
    "permit permits": "reservation",
    "meter meters": "bucket, buckets",
    "standing": "ejection state",
    "parking": "idle connections",
    "door": "worker context",
    "aside": "background, out of rotation",
}
"""Words of identifiers, separated by spaces, and the terms to use."""

WHOLE_NAMES: dict[str, str] = {
    "State": "Snapshot",
    "Call": "ClientRequest",
    "Account account": "RequestContext, context",
    "Outbound outbound": "UpstreamRequest",
    "Gate gate": "ConnectionContext, RequestServices",
    "Relay relay Relays relays": "Worker, worker",
    "Found": "the name of what was found",
    "ends": "finishes, expires; end",
    "over is_over": "finished, expired",
    "leave leaves": "disconnect, drain",
    "aside": "background",
}
"""Complete identifiers, separated by spaces, and the names to use. Leading underscores do not count."""

IN_SENTENCES = "ask asks look looks looked place places turn turns room word words away picture member members patient"
"""Words of ``NAMES`` that the name of a test may have, because it is a sentence; separated by spaces."""

_FINITE = r"(?:is|are|was|were|be|been|being)"


class Phrase(NamedTuple):
    """A regular expression and what to write instead. A space in it matches any white space, also across lines."""

    pattern: str
    replacement: str


PHRASES: tuple[Phrase, ...] = (
    # Pronouns and subjects
    Phrase(r"whoever|whomever", "name the client, the request, the process"),
    Phrase(r"nobody(?:'s)?", "no client, no process; or use the passive"),
    Phrase(r"(?:somebody|anybody|everybody)(?:'s)?", "name the client, the user, the process"),
    Phrase(r"he|him|his|himself|she|her", "it, the request, the client"),
    Phrase(r"(?:of|to|for|and|or|than|by|from|with|those|one) who", "the client that, the request that"),
    Phrase(r"who (?:leaves?|left|waits|waited|asks?|asked|comes|came|has|had|finds|sends|sent|is)", "a client that …, a request that …"),
    Phrase(r"(?:one|ones) (?:that|who|which|of them)", "repeat the noun"),
    Phrase(r"such of", "those of, the … of"),
    Phrase(r"(?:and|or|of|by|with|for|but|to) such(?! as\b| a\b| an\b)", "name the things"),
    Phrase(r"what is none", "an invalid …, a malformed …"),
    Phrase(rf"{_FINITE} (?-i:none)(?! of\b)", "is not a …, is invalid, does not exist"),
    Phrase(r"(?<!there\x20)(?:is|are) no (?!longer|more|less|other|reason|need|way|such|different|better|worse)", "is not a …"),
    # Verbs of speaking
    Phrase(rf"{_FINITE} (?:not )?told", "receives, is reported, is notified"),
    Phrase(r"(?:tells?|told|telling) (?:of|apart)", "reports, mentions; distinguishes"),
    Phrase(r"(?:says?|said|speaks?|spoke|spoken|hears?|heard) of", "mentions, describes, reports about"),
    Phrase(r"knows? (?:nothing )?of", "depends on, contains; does not depend on"),
    Phrase(r"(?:ask|asks|asked|asking) for(?: by)?", "requests, requires; requested, required"),
    Phrase(r"asks? nothing", "requires no …"),
    Phrase(r"as (?:\S+ ){1,5}has it", "(RFC …), as … specifies"),
    Phrase(r"in (?:its|their|other|so many|these|plain|a few) words", "as text; delete"),
    Phrase(r"words? of (?:its|their)", "text, message"),
    Phrase(r"by heart", "fixed, deterministic"),
    # Verbs of beginning and ending
    Phrase(r"anew|afresh", "again"),
    Phrase(r"(?:go|goes|going|went) on(?! to\b)", "continues, resumes"),
    Phrase(rf"{_FINITE} over(?! (?:the|a|an|its|their|this|that|all|HTTP|\d))", "has finished, has expired"),
    Phrase(r"(?:break|breaks|broke|broken|breaking) off", "disconnect, is truncated, closes the connection"),
    Phrase(r"(?:client|clients|reader|caller|user) (?:that |which )?(?:leaves?|left|leaving)(?! (?:out|it|unset))", "disconnects"),
    Phrase(rf"{_FINITE} gone", "has exited, has disconnected, is removed"),
    Phrase(r"come[s]? to nothing", "has no effect, fails"),
    Phrase(r"(?:give|gives|gave|given|giving) back", "release, return"),
    Phrase(r"(?:take|takes|took|taken|taking) away", "remove, uninstall"),
    Phrase(r"(?:take|takes|took|taken|taking) for", "treat as"),
    Phrase(r"(?:let|lets|letting) in", "accept, admit"),
    Phrase(r"(?:turn|turns|turned|turning) away", "reject"),
    Phrase(r"stands? still", "is blocked, stops reading"),
    Phrase(r"(?:stand|stands|stood|standing) (?:in|at|there|behind|before|under|alone)", "is in, is at, follows, precedes"),
    Phrase(r"(?:held|holds|hold|holding) (?:\S+ ){0,4}(?:against|to its|to the)", "checked against, compared with"),
    Phrase(r"(?:held|hold|holds) to", "checked against, guaranteed"),
    # Conditions
    Phrase(r"(?:None|empty|0|nothing|false|true|all) where", "None if …, 0 if …"),
    Phrase(r"(?:by|in|for|is given|after) so many (?:seconds|bytes|tokens|requests)", "that many; name the number"),
    Phrase(r"which is no|that is no (?!longer|more)", "which is not a …"),
    # Idioms
    Phrase(r"of (?:its|their|his|her|one's) own(?: doing)?", "its own …, a separate …"),
    Phrase(r"all the same", "anyway, still, nevertheless"),
    Phrase(r"the very (?:same|moment|first|last|one|bytes|thing)", "the same, immediately"),
    Phrase(r"nothing but", "only"),
    Phrase(r"in peace|to no avail|for good|by turns|before all|without more", "plain words; delete"),
    Phrase(r"from then on|and the like|the likes of", "afterwards; name the things"),
    Phrase(r"a second time|once more", "again"),
    Phrase(r"makes? of (?:it|them|the)", "does with, interprets"),
    Phrase(r"place of (?:its|their)", "position, location"),
    Phrase(r"to have (?:\S+ )?(?:fetch|ask|send)", "to make … fetch"),
    Phrase(r"vectors in bytes", "binary embeddings"),
    Phrase(r"short way", "fast path"),
    # Old names of the project
    Phrase(r"story|stories", "request handler, inline task"),
    Phrase(r"turns? of (?:the|a|its) (?:event )?loop|(?:loop's|this|same|next) turn", "event-loop iteration"),
    Phrase(r"(?:the|keeps?|keeping|more|into its|its) books", "accounting, usage recording"),
    Phrase(r"lobby|(?:waiting|model's|its|server's|the) rooms?(?! for\b| left\b| to\b| in\b)", "queue"),
    Phrase(r"outlets?", "write batch, batching transport"),
    Phrase(r"scoreboards?|the board", "shared counters"),
    Phrase(r"(?:the|a|its|each|every|killed|frozen|of) (?:keeper|keepers)(?:'s)?", "shim"),
    Phrase(r"parting", "draining"),
    Phrase(r"patience", "timeout"),
    Phrase(r"strangers?", "unauthenticated client"),
    Phrase(r"(?:the|a|its) tickets?|(?:the|a|its) permits?", "in-flight slot; reservation"),
    Phrase(r"(?:the|a|an|each|every|all|its|of|new|dead|other|one|two|many|several|another|any|more|by|in|to) relays?(?:'s|')?", "worker"),
    Phrase(r"relay process(?:es)?|relays'|server\.relays", "worker, worker process"),
    Phrase(r"the house", "the concurrency limit"),
    Phrase(r"(?:request|response|the|a|its|of|and|answer's|bad|long) heads?(?! of)", "headers, request line and headers"),
    Phrase(r"(?:its|the|a|of|other|unknown|JSON|more|wrong) members?(?: of)?(?! of (?:the|a) group)", "field, fields"),
)  # fmt: skip
"""What prose does not say, anywhere in a sentence. Case is ignored."""

OPENINGS: tuple[Phrase, ...] = (
    Phrase(r"Who(?:ever|se)?\b(?![^.!]*\?)", "name the client, the request, the process"),
    Phrase(r"What\b(?![^.!]*\?)", "name the subject: `The body …`, `A failed request …`"),
    Phrase(r"Such\b", "name the things"),
    Phrase(r"(?:That|Those) of\b", "repeat the noun"),
    Phrase(r"He\b", "it, the request, the client"),
    Phrase(r"None is\b", "No … is"),
    Phrase(r"Of (?:it|them|these|those|its|a|an|the)\b", "put the subject first"),
    Phrase(r"Where there (?:is|are)\b", "If there is"),
)
"""What no sentence starts with."""

DOCSTRING_OPENINGS = (
    "a all an another any as each every her his how if in it its no none nothing of on one our such that the their there these this those "
    "to what when where whether which while who whoever whose with"
)
"""First words of a function's docstring that are not verbs, separated by spaces. A docstring starts with a verb: `Return …`, `Check …`."""
