"""Search over whole texts: generates several continuations of a prompt and chooses one.

A method defines where a continuation forks, the number of branches, and the choice of the answer
(`engine.methods` has the methods). Forks are decided position by position, in the order of the
rows, as if all continuations advanced in step. So neither the batch nor the device's timing changes
a search, although rows run ahead of each other.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request, check_request
from entropix_jax.engine.results import KeptCache, Row
from entropix_jax.engine.shapes import MIN_CAPACITY, bucket
from entropix_jax.engine.state import Recording
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel

MAX_FORKS = 32  # continuations of a prompt

# Actions of tokens that no model chose.
_FORCED = ("inject", "lookup", "clarify", "think_end", "budget_forcing")

Extract = Callable[[str], str | None]  # the answer in a text


@dataclass(frozen=True)
class Method:
    """Rules for forking the continuations of a prompt and for choosing one of them.

    Attributes:
        forks_at: whether a continuation forks at a token. None: all begin at the prompt, with their
            own random numbers.
        width: number of tokens that a fork continues with: the chosen one and the most likely
            others. 0 for a beam, which considers twice as many as it is wide.
        replaces: a fork continues with the most likely tokens only, and drops the chosen one if it
            is not among them.
        choice: "vote" (the most frequent answer), "likeliest" (the highest mean log-probability),
            "surest" (the highest of the lowest group confidences), "weighted" (the answer with the
            largest sum of lowest group confidences), or "first" (the continuation that ends first;
            the others are then cancelled).
        make: the class of its searches. None: `Search`.
    """

    name: str
    forks_at: Callable[[Request, TokenRecord], bool] | None = None
    width: int = 1
    choice: str = "vote"
    replaces: bool = False
    make: "type[Search] | None" = None

    def with_vote(self, vote: bool) -> "Method":
        """Returns the method with a vote as its choice. Without `vote`, a method that votes takes
        the first continuation that ends. UserError for a method that cannot vote."""
        if self.make is not None:
            if vote and not self.votes:
                raise UserError(f"method '{self.name}' does not vote")
            return self
        if not self.votes:
            return replace(self, choice="vote") if vote else self
        return self if vote else replace(self, choice="first")

    @property
    def votes(self) -> bool:
        """Whether the choice counts answers."""
        return self.choice in VOTES

    def search(self, request: Request, forks: int) -> "Search":
        """Returns the search of one prompt with at most `forks` continuations."""
        return (self.make or Search)(request, self, forks)


VOTES = ("vote", "weighted")  # choices that count answers
SINGLE = Method("single", choice="first")


def recording_for(method: Method, forks: int) -> Recording:
    """Returns the recording that an engine needs for a method with at most `forks` rows."""
    if (method.forks_at is None and method.make is None) or forks == 1:
        return Recording()
    return Recording(top=method.width or 2 * forks, state=True)


@dataclass(frozen=True)
class Fork:
    """`row` diverged from `parent` at a position, with another token of the given log-probability
    (nats). Rows are indices."""

    row: int
    parent: int
    position: int
    token_id: int
    logprob: float


@dataclass(frozen=True)
class Outcome:
    """The result of a search.

    Attributes:
        rows: the continuations, in the order in which they began.
        forks: the forks that made them.
        chosen: the index of the chosen one.
        answer: of the chosen one; None without an answer or an `extract` function.
        votes: number of continuations for each answer, the most frequent first.
        forwards: token positions that were evaluated, shared ones once.
    """

    rows: Sequence[Row]
    forks: Sequence[Fork]
    chosen: int
    answer: str | None
    votes: Mapping[str, int]
    forwards: int

    @property
    def row(self) -> Row:
        """The chosen continuation."""
        return self.rows[self.chosen]

    def to_json(self) -> dict[str, Any]:
        """The chosen text, its answer, the votes and forwards, and all continuations, each with the
        fork that it began with."""
        forks = {fork.row: asdict(fork) for fork in self.forks}
        rows = [
            forks.get(i, {}) | {"row": i, "text": row.text, "finish_reason": row.finish_reason}
            for i, row in enumerate(self.rows)
        ]
        return {
            "text": self.row.text,
            "chosen": self.chosen,
            "answer": self.answer,
            "votes": dict(self.votes),
            "forwards": self.forwards,
            "continuations": rows,
        }


@dataclass(eq=False)
class Search:
    """The search of one prompt. It is the `tag` of its rows' requests.

    Attributes:
        request: of the first continuation; `tag` is the caller's.
        forks: maximum number of continuations.
    """

    request: Request
    method: Method = SINGLE
    forks: int = 1
    rows: list[Row] = field(default_factory=list)
    made: list[Fork] = field(default_factory=list)
    _at: int = 0  # index of the generated token that is decided next
    _first: int | None = None  # the continuation that ended first

    def begin(self, engine: Engine) -> list[Request]:
        """Creates the first rows, and returns their requests for the engine to run."""
        number = self.forks if self.method.forks_at is None else 1
        request = replace(self.request, tag=self)
        ids = [request.row_id, *(f"{request.row_id}.{i}" for i in range(1, number))]
        requests = [replace(request, row_id=row_id, number=i) for i, row_id in enumerate(ids)]
        self.rows = [*map(engine.new_row, requests)]
        if self.method.forks_at is not None or self.method.make is not None:
            self.rows[0].kept = KeptCache()
        return requests

    def advance(self, engine: Engine) -> bool:
        """Decides the forks that the tokens so far determine. Returns whether the search ended."""
        while self._first is None and self._is_known():
            ended = (i for i, row in enumerate(self.rows) if self._ends_here(row))
            if self._ends_early and (first := next(ended, None)) is not None:
                self._first = first
                for row in self.rows:
                    end_row(engine, row, self._at + 1)
            else:
                for index in self._due():
                    self._fork(engine, index, self.rows[index])
            self._at += 1
        return self._has_ended()

    def outcome(self, extract: Extract | None = None) -> Outcome:
        """Returns the result of a search that has ended. `extract` finds the answer in a text.
        UserError for a vote without answers to count."""
        if self.method.votes and extract is None and len(self.rows) > 1:
            raise UserError(f"method '{self.method.name}' votes, but these texts have no answers")
        answers = [None if extract is None or row.error else extract(row.text) for row in self.rows]
        counts = Counter(answer for answer in answers if answer is not None)
        chosen = self._choose(answers)
        return Outcome(
            rows=tuple(self.rows),
            forks=tuple(self.made),
            chosen=chosen,
            answer=answers[chosen],
            votes=dict(counts.most_common()),
            forwards=sum(self._forwards(index) for index in range(len(self.rows))),
        )

    def _has_ended(self) -> bool:
        """Whether all continuations have ended. Their kept caches are then dropped."""
        if any(row.finish_reason is None for row in self.rows):
            return False
        for row in self.rows:
            row.kept = row.parent = None
        return True

    @property
    def _ends_early(self) -> bool:
        """Whether the first continuation that ends is the answer."""
        return self.method.choice == "first"

    def _is_known(self) -> bool:
        """Whether every row has a token at the current position or has ended; at least one has
        it."""
        has_it = [len(row.tokens) > self._at for row in self.rows]
        ended = (row.finish_reason is not None for row in self.rows)
        return any(has_it) and all(map(max, has_it, ended))

    def _ends_here(self, row: Row) -> bool:
        ends = row.finish_reason is not None and row.error is None
        return ends and len(row.tokens) == self._at + 1

    def _due(self) -> list[int]:
        """Returns the continuations that fork at the token that is decided."""
        forks_at = self.method.forks_at
        if forks_at is None:
            return []
        here = (index for index, row in enumerate(self.rows) if self._may_fork(row, self._at))
        return [i for i in here if forks_at(self.request, self.rows[i].tokens[self._at])]

    @staticmethod
    def _may_fork(row: Row, at: int) -> bool:
        """Whether a continuation has a model-chosen token at an index and can be forked there. It
        cannot within a forced text."""
        tokens = row.tokens
        if len(tokens) <= at or tokens[at].action in _FORCED or tokens[at].top is None:
            return False
        return at == 0 or tokens[at - 1].state is not None

    def _fork(self, engine: Engine, index: int, row: Row) -> None:
        """Forks a continuation at the token that is decided, as far as the budget allows."""
        token, remaining = row.tokens[self._at], self.forks - len(self.rows)
        if remaining < 1:
            return
        width = self.method.width
        # The engine may record more than the method needs.
        most = self._candidates(token, width)
        if self.method.replaces:
            most = most[: 1 + remaining]
            if most and token.token_id not in dict(most):  # the chosen token's place is taken
                self.rows[index] = self._branch(engine, row, most.pop(0)[0])
                end_row(engine, row, self._at)
        others = [pair for pair in most if pair[0] != token.token_id]
        for token_id, logprob in others[: min(width - 1, remaining)]:
            self.made.append(Fork(len(self.rows), index, token.position, token_id, logprob))
            self.rows.append(self._branch(engine, row, token_id))

    def _candidates(self, token: TokenRecord, count: int) -> list[tuple[int, float]]:
        """Returns the most likely tokens in place of a token that texts may hold, with ln p."""
        never = self.request.sampler.settings.unwritable.tolist()
        most = (token.top or ())[:count]
        return [(i, math.log(p)) for i, _, p in most if p > 0 and i not in never]

    def _branch(self, engine: Engine, row: Row, token_id: int, at: int | None = None) -> Row:
        """Returns a new row with a row's tokens before an index, by default the decided one, and
        then the token."""
        position = len(self.request.prompt) + (self._at if at is None else at)
        (fork,) = engine.fork(row, 1, position=position)
        engine.force(fork, [token_id])
        return fork

    def _choose(self, answers: Sequence[str | None]) -> int:
        choice, numbers = self.method.choice, range(len(self.rows))
        if choice == "first":
            return self._first or 0
        if self.method.votes:
            weights = [*map(_lowest_confidence, self.rows)] if choice == "weighted" else None
            return answers.index(vote(answers, weights))
        value = _mean_logprob if choice == "likeliest" else _lowest_confidence
        sound = [index for index in numbers if self.rows[index].error is None] or numbers
        return max(sound, key=lambda index: value(self.rows[index]))

    def _forwards(self, index: int) -> int:
        """Returns the token positions that only this continuation evaluated, up to the end of the
        search. That its fork reads the last shared token again does not count."""
        row = self.rows[index]
        fork = next((fork for fork in self.made if fork.row == index), None)
        begin = 0 if fork is None else fork.position - len(self.request.prompt)
        end = len(row.tokens) if self._first is None else min(len(row.tokens), self._at)
        if end <= begin:
            return 0
        shared = row.tokens[begin - 1].forwards + 1 if begin else 0
        return row.tokens[end - 1].forwards - shared


def run_searches(engine: Engine, searches: Iterable[Search]) -> Iterator[Search]:
    """Runs searches in parallel, and yields each when it has ended."""
    source = (request for search in searches for request in search.begin(engine))
    for event in engine.run(source):
        search: Search = event.row.request.tag
        if search.advance(engine):
            yield search


def search(
    model: LanguageModel,
    request: Request,
    method: Method,
    forks: int,
    extract: Extract | None = None,
    *,
    on_engine: Callable[[Engine], Any] = lambda engine: None,
) -> Outcome | None:
    """Runs the search of one prompt with at most `forks` continuations. `on_engine` gets the
    engine, so that it can be stopped. A stopped search returns None. UserError for a vote without
    `extract` or too little memory, or see `check_request`."""
    longest = len(request.prompt) + check_request(model, request)
    engine = Engine(
        model,
        slots=forks,
        capacity=bucket(longest, MIN_CAPACITY),
        recording=recording_for(method, forks),
    )
    on_engine(engine)
    ended = next(run_searches(engine, [method.search(request, forks)]), None)
    return None if ended is None else ended.outcome(extract)


def end_row(engine: Engine, row: Row, count: int) -> None:
    """Ends a row. It keeps its first `count` tokens: those ahead depend on the device's timing."""
    if row.finish_reason is None:
        engine.end(row)
    if len(row.tokens) > count:
        row.tokens = row.tokens[:count]
        row.text = "".join(token.text for token in row.tokens)
        row.finish_reason, row.error = "cancelled", None
    if 0 < len(row.tokens) == count:
        live = [index for index, (_, retracted) in enumerate(row.log) if not retracted]
        row.log = row.log[: live[count - 1] + 1]
        row.retracted_tokens = [token for token, retracted in row.log if retracted]


def vote(answers: Sequence[str | None], weights: Sequence[float] | None = None) -> str | None:
    """Returns the answer with the largest sum of weights, on a tie the first; None if no sample has
    an answer. Without weights it is the most frequent one."""
    own: defaultdict[str, list[float]] = defaultdict(list)
    for answer, weight in zip(answers, weights or [1.0] * len(answers), strict=True):
        if answer is not None:
            own[answer].append(weight)
    return max(own, key=lambda answer: math.fsum(own[answer])) if own else None


def _mean_logprob(row: Row) -> float:
    tokens = row.tokens
    return sum(token.logprob for token in tokens) / len(tokens) if tokens else -float("inf")


def _lowest_confidence(row: Row) -> float:
    groups = row.group_confidences()
    return float(groups.min()) if groups.size else 0.0
