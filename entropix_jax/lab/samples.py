"""Several samples of each request, and one text or answer made of them: best-of-n, and
self-consistency (Wang et al. 2022, arXiv 2203.11171)."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from entropix_jax.engine.engine import Engine
from entropix_jax.engine.results import Request, Row
from entropix_jax.lab.statistics import majority_vote


@dataclass(frozen=True)
class Samples:
    """All samples of one request."""

    request: Request
    rows: tuple[Row, ...]

    @property
    def forwards(self) -> int:
        """The tokens drawn."""
        return sum(len(row.tokens) for row in self.rows)

    def best(self, score: Callable[[Row], float]) -> Row:
        """The row of the highest score, the first of several: of `mean_logprob`, or a check."""
        return max(self.rows, key=score)

    def vote(self, extract: Callable[[str], str | None]) -> str | None:
        """The most frequent answer that `extract` finds in the texts; see `majority_vote`."""
        return majority_vote([extract(row.text) for row in self.rows])


def draw_samples(engine: Engine, requests: Iterable[Request], number: int) -> Iterator[Samples]:
    """Draws so many samples of each request, and yields them once the last one has ended. Their ids
    are the request's with "/1", "/2", and so on.

    Raises:
        UserError: as `Engine.run`.
    """

    def begin() -> Iterator[Request]:
        for request in requests:
            rows: list[Row] = []
            for i in range(1, number + 1):
                yield replace(request, row_id=f"{request.row_id}/{i}", tag=(request, rows))

    for event in engine.run(begin()):
        if event.row.finish_reason is None:
            continue
        request, rows = event.row.request.tag
        rows.append(event.row)
        if len(rows) == number:
            yield Samples(request, tuple(sorted(rows, key=lambda row: row.number)))


def mean_logprob(row: Row) -> float:
    """The mean of ln p over a row's tokens, nats: a score of `Samples.best`."""
    return sum(token.logprob for token in row.tokens) / max(len(row.tokens), 1)
