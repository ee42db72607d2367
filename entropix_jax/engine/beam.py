"""Beam search over the rows of an engine.

Each position continues the `forks` hypotheses with the highest sums of ln p. A hypothesis that ends
leaves the beam with its mean ln p. The search ends when as many have ended, and the best live one
has no higher mean than the worst of them. The sampler should commit one token per step. The preset
`greedy` needs the fewest forks.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from entropix_jax.engine.engine import Engine
from entropix_jax.engine.results import Row
from entropix_jax.engine.search import Extract, Outcome, Search, end_row


@dataclass(eq=False)
class Beam(Search):
    """The beam search of one prompt, `forks` wide. `rows` are the hypotheses, live and ended."""

    _live: list[tuple[Row, float]] = field(default_factory=list)  # with sums of ln p, best first
    _ended: list[tuple[Row, float]] = field(default_factory=list)  # with means of ln p, best first
    _evaluated: int = 0

    def begin(self) -> list[Row]:
        """Returns the row for the engine to run."""
        self.rows = super().begin()[:1]
        self._live = [(self.rows[0], 0.0)]
        return [*self.rows]

    def advance(self, engine: Engine) -> bool:
        """Extends the beam by the tokens that are known. Returns whether the search ended."""
        while not self._is_decided() and self._is_known():
            self._end_hypotheses()
            if not self._is_decided():
                self._evaluated += len(self._live) if self._at else 0
                self._extend(engine)
        if not self._is_decided():
            return False
        for row, _ in self._live:
            end_row(engine, row, self._at)
        self._live = []
        self.rows = [row for row, _ in self._ended]
        return all(row.finish_reason is not None for row in self.rows)

    def outcome(self, extract: Extract | None = None) -> Outcome:
        """Returns the ended hypotheses, the one with the highest mean ln p chosen."""
        answers = [None if extract is None or row.error else extract(row.text) for row in self.rows]
        counts = Counter(answer for answer in answers if answer is not None)
        votes = dict(counts.most_common())
        return Outcome(tuple(self.rows), (), 0, answers[0], votes, self._evaluated)

    def _is_known(self) -> bool:
        """Whether every live hypothesis has a token at the current position or has ended."""
        rows = [row for row, _ in self._live]
        return all(len(row.tokens) > self._at or row.finish_reason is not None for row in rows)

    def _is_decided(self) -> bool:
        """Whether no live hypothesis can be better than the ended ones."""
        if len(self._ended) < self.forks or not self._live:
            return not self._live
        return self._live[0][1] / max(self._at, 1) <= self._ended[-1][1]

    def _end_hypotheses(self) -> None:
        """Takes out of the beam the hypotheses that ended before the current position."""
        for row, total in [*self._live]:
            if len(row.tokens) <= self._at:
                self._live.remove((row, total))
                self._end(row, total)

    def _end(self, row: Row, total: float) -> None:
        mean = -math.inf if row.error else total / max(self._at, 1)
        self._ended = sorted([*self._ended, (row, mean)], key=lambda one: -one[1])[: self.forks]

    def _extend(self, engine: Engine) -> None:
        """Keeps the best continuations of the live hypotheses by one token: of twice as many as the
        beam is wide, those that continue, and those that end and are among the first."""
        found = sorted(self._continuations(), key=lambda one: (-one[0], one[1]))
        live: list[tuple[Row, float]] = []
        ended: list[tuple[Row, float]] = []
        kept: set[int] = set()  # hypotheses whose row continues
        for rank, (total, place, token_id) in enumerate(found[: 2 * self.forks]):
            ends = token_id in self.request.eos_ids
            if rank >= self.forks if ends else len(live) == self.forks:
                continue
            row = self._live[place][0]
            if row.tokens[self._at].token_id == token_id and place not in kept:
                kept.add(place)
            else:
                row = self._branch(engine, row, token_id)
            (ended if ends else live).append((row, total))
        for place, (row, _) in enumerate(self._live):
            if place not in kept:
                end_row(engine, row, self._at)
        self._live = live
        self._at += 1
        for row, total in ended:
            self._end(row, total)
        self.rows = [row for row, _ in self._live + self._ended]

    def _continuations(self) -> Iterator[tuple[float, int, int]]:
        """Yields sums of ln p, the indices of live hypotheses, and their next tokens."""
        never = {*self.request.sampler.settings.unwritable.tolist()}
        for place, (row, total) in enumerate(self._live):
            token = row.tokens[self._at]
            if not self._may_fork(row, self._at):  # within a text that was committed at once
                yield total + token.logprob, place, token.token_id
                continue
            for token_id, _, p in (token.top or ())[: 2 * self.forks]:
                if p > 0 and token_id not in never:
                    yield total + math.log(p), place, token_id
