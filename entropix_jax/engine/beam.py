"""Beam search over the rows of an engine.

Each position continues the `forks` hypotheses with the highest sums of ln p. A hypothesis that ends
leaves the beam with its mean ln p. The search ends when `forks` hypotheses have ended and no live
one has a higher mean. The sampler should commit one token per step. The preset
`greedy` needs the fewest forks.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.engine.search import Extract, Outcome, Search, end_row


@dataclass(eq=False)
class Beam(Search):
    """The beam search of one prompt, `forks` wide. `rows` are the hypotheses, live and ended."""

    _live: list[tuple[Row, float]] = field(default_factory=list)  # with sums of ln p, best first
    _ended: list[tuple[Row, float]] = field(default_factory=list)  # with means of ln p, best first
    _evaluated: int = 0

    def begin(self, engine: Engine) -> list[Request]:
        """Creates the first row, and returns its request for the engine to run."""
        requests = super().begin(engine)[:1]
        self.rows = self.rows[:1]
        self._live = [(self.rows[0], 0.0)]
        return requests

    def advance(self, engine: Engine) -> bool:
        """Extends the beam by the tokens that are known. Returns whether the search ended."""
        while not self._is_decided() and self._is_known():
            self._end_hypotheses(engine)
            if not self._is_decided():
                self._evaluated += len(self._live) if self._at else 0
                self._extend(engine)
        if not self._is_decided():
            return False
        for row, _ in self._live:
            end_row(engine, row, self._at)
        self._live = []
        self.rows = [row for row, _ in self._ended]
        return self._has_ended()

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

    def _end_hypotheses(self, engine: Engine) -> None:
        """Takes out of the beam the hypotheses that ended before the current position."""
        ended = [one for one in self._live if len(one[0].tokens) <= self._at]
        self._live = [one for one in self._live if len(one[0].tokens) > self._at]
        self._end(engine, ended)

    def _end(self, engine: Engine, hypotheses: Sequence[tuple[Row, float]]) -> None:
        """Adds hypotheses, with sums of ln p, to the ended ones, and drops the worst of these."""
        for row, total in hypotheses:
            mean = -math.inf if row.error else total / max(self._at, 1)
            self._ended.append((row, mean))
        self._ended.sort(key=lambda one: -one[1])
        for row, _ in self._ended[self.forks :]:
            end_row(engine, row, self._at)
        del self._ended[self.forks :]

    def _extend(self, engine: Engine) -> None:
        """Keeps the best continuations of the live hypotheses by one token: of twice as many as the
        beam is wide, those that continue, and those that end and are among the first."""
        found = sorted(self._continuations(), key=lambda one: (-one[0], one[1]))
        live: list[tuple[Row, float]] = []
        ended: list[tuple[Row, float]] = []
        kept: set[int] = set()  # hypotheses whose row continues
        for rank, (total, place, token_id) in enumerate(found[: 2 * self.forks]):
            ends = token_id in self.request.eos_ids
            is_late = ends and rank >= self.forks
            is_full = not ends and len(live) == self.forks
            if is_late or is_full:
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
        self._end(engine, ended)
        self.rows = [row for row, _ in self._live + self._ended]

    def _continuations(self) -> Iterator[tuple[float, int, int]]:
        """Yields sums of ln p, the indices of live hypotheses, and their next tokens."""
        for place, (row, total) in enumerate(self._live):
            token = row.tokens[self._at]
            if not self._may_fork(row, self._at):  # within a text that was committed at once
                yield total + token.logprob, place, token.token_id
                continue
            for token_id, logprob in self._candidates(token, 2 * self.forks):
                yield total + logprob, place, token_id
