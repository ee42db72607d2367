"""Random forks that match a method's own: the control for where a method forks.

A preliminary run of the method gives the number of forks and the probability of each forced token.
The control forks a new continuation as often, at random tokens where a token of about the same
probability can be forced. Forks of forks are matched level by level, so both trees have the same
number of continuations at each depth.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from entropix_jax.engine.loop import Engine
from entropix_jax.engine.results import KeptCache
from entropix_jax.engine.search import Fork, Search

CALIPER = 0.25  # nats: largest difference of the log-probabilities of matched tokens

# The index of a continuation and of its token, the other token, and its log-probability (nats).
_Place = tuple[int, int, int, float]


@dataclass(eq=False)
class MatchedForks(Search):
    """Forks at random tokens, matched to the method's own in count, depth and probability. A
    continuation that forks keeps its drawn token. The cost of the preliminary run is not
    included."""

    _levels: list[list[float]] | None = None  # log-probabilities to match, by depth
    _depths: list[int] = field(default_factory=list)  # of the continuations
    _random: Random = field(default_factory=Random)

    def advance(self, engine: Engine) -> bool:
        """Runs the method, and then the control, once for each depth."""
        if self._levels is None:
            if not super().advance(engine):
                return False
            self._begin_control(engine)
            return False
        if all(row.finish_reason is not None for row in self.rows) and self._levels:
            self._fork_level(engine, self._levels.pop(0))
        return self._has_ended()

    @property
    def _ends_early(self) -> bool:
        return False

    def _begin_control(self, engine: Engine) -> None:
        """Starts the control's first continuation, with its own random numbers."""
        levels = defaultdict(list)
        depths = [0]
        for fork in self.made:
            depths.append(depths[fork.parent] + 1)
            levels[depths[-1]].append(fork.logprob)
        self._levels = [levels[depth] for depth in sorted(levels)]
        self._random.seed(f"{self.request.seed}:{self.request.row_id}")
        self.rows = engine.fork(self.rows[0], 1, position=len(self.request.prompt))
        self.rows[0].kept = KeptCache()
        self.made, self._depths = [], [0]

    def _fork_level(self, engine: Engine, wanted: list[float]) -> None:
        """Forks the continuations of the last level, once for each log-probability."""
        places = [*self._places(max(self._depths))]
        for logprob in wanted:
            near = [place for place in places if abs(place[3] - logprob) <= CALIPER]
            near = near or sorted(places, key=lambda place: abs(place[3] - logprob))[:1]
            if not near:
                return
            place = self._random.choice(near)
            places.remove(place)
            index, at, token_id, logprob = place
            row = self._branch(engine, self.rows[index], token_id, at)
            position = len(self.request.prompt) + at
            self.made.append(Fork(len(self.rows), index, position, token_id, logprob))
            self.rows.append(row)
            self._depths.append(self._depths[index] + 1)

    def _places(self, depth: int) -> Iterator[_Place]:
        """Yields the places where continuations of a depth can fork, never at an end token."""
        begins = {fork.row: fork.position - len(self.request.prompt) for fork in self.made}
        for index, row in enumerate(self.rows):
            if self._depths[index] != depth or row.error is not None:
                continue
            begin = begins[index] + 1 if index in begins else 0
            for at in range(begin, len(row.tokens)):
                token = row.tokens[at]
                if token.token_id in self.request.eos_ids or not self._may_fork(row, at):
                    continue
                for token_id, logprob in self._candidates(token, self.method.width):
                    if token_id != token.token_id:
                        yield index, at, token_id, logprob
