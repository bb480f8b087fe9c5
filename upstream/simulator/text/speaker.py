"""The text that the simulator generates: sentences of common words, a function of a seed alone.

Some words are outside ASCII on purpose: their UTF-8 bytes go over the wire raw and may be cut by a chunk.
"""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Final

from upstream.simulator.text import tokenizer

WORDS: Final = tuple(
    """
    a about after again air all along also always and another any are around ask at away back because been before
    began below between both boat book bridge but by café came can carry children city clear cold could country day
    did different door down each early earth end enough even every eye far father few field find fire first five
    follow food form found four from garden give go good great green ground grow hand harbour hard head hear help
    here high home house idea important in into island it just keep kind know land large last later learn leave left
    letter life light line little live long look made make many map mean might mile money more morning most mountain
    move much must naïve name near never new night north number of off old on once one open or other our over page
    paper part people place plain point quick quiet rain read ready right river road round sea second see sentence
    several she ship shore short should side simple small snow some sometimes song soon sound south star stay still
    stone stop story street such summer sun table take tell than that the their then there these they thing think
    this three through time to today together took town tree true turn two under until up upon use very voice walk
    wall want was water way we well went were what wheel when where which while white why wind window winter with
    without wood word work world would write year young 世界 天气 你好 été über señor 🙂
    """.split()  # noqa: SIM905
)


def seed_of(*parts: object) -> int:
    """Return a number for any values that is the same in every process (``hash`` is not)."""
    return int.from_bytes(blake2b("\x1f".join(map(str, parts)).encode("utf-8", "replace"), digest_size=8).digest())


class Speaker:
    """An endless text, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  determinism is the point
        self._left_in_sentence = 0

    def between(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def word(self) -> str:
        return self._random.choice(WORDS)

    def pieces(self, count: int) -> list[str]:
        """Exactly ``count`` pieces of text; the first has no space before it."""
        texts: list[str] = []
        while len(texts) < count:
            texts += tokenizer.pieces(self._next_word(first=not texts))
        return texts[:count]

    def _next_word(self, *, first: bool) -> str:
        space = "" if first else " "
        if self._left_in_sentence == 0:
            self._left_in_sentence = self.between(5, 14)
            return space + self.word().capitalize()
        self._left_in_sentence -= 1
        return space + self.word() + ("." if self._left_in_sentence == 0 else "")
