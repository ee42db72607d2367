"""`entropix-jax generate --method`: generates several continuations and chooses one."""

import sys
from typing import TYPE_CHECKING

from entropix_jax.cli.options import EXIT_OK, print_json
from entropix_jax.cli.status import StatusLine, show_waits
from entropix_jax.cli.terminal import TextScreen, summary
from entropix_jax.errors import UserError, printable
from entropix_jax.host.interrupts import EXIT_INTERRUPT, deferred_interrupts

if TYPE_CHECKING:
    from entropix_jax.engine.loop import Engine
    from entropix_jax.engine.request import Request
    from entropix_jax.engine.search import Method, Outcome
    from entropix_jax.model.loading import LanguageModel

_SHOWN = 60  # characters of a continuation


def run_search(
    model: "LanguageModel", request: "Request", method: "Method", forks: int, *, as_json: bool
) -> int:
    """Runs a search, prints the chosen text and the tree of continuations, and returns the exit
    status."""
    from entropix_jax.engine.search import search
    from entropix_jax.text.numbers import last_answer

    engines: list[Engine] = []

    def stop() -> None:
        for engine in engines:
            engine.stop()

    status = StatusLine()
    status.show(f"searching with {forks} continuations")
    waits = show_waits(status, lambda: engines[-1].programs if engines else None)
    with waits, deferred_interrupts(stop):
        outcome = search(model, request, method, forks, last_answer, on_engine=engines.append)
    if outcome is None:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPT
    if outcome.row.error is not None:
        raise UserError(outcome.row.error)
    if as_json:
        print_json(outcome.to_json())
        return EXIT_OK
    screen, left = TextScreen(), outcome.row.text  # without the stop string that ended it
    for token in outcome.row.tokens:
        screen.show(left[: len(token.text)], token)
        left = left[len(token.text) :]
    screen.end_text()
    print(_tree(outcome), file=sys.stderr)
    print(summary([outcome.row], 0.0), file=sys.stderr)
    return EXIT_OK


def _tree(outcome: "Outcome") -> str:
    """Returns a line for each continuation, indented below the one that it parts from, and one of
    votes and costs. An asterisk marks the chosen one."""
    forks = {fork.row: fork for fork in outcome.forks}
    depth = {0: 0}
    for child, fork in forks.items():
        depth[child] = depth[fork.parent] + 1
    lines = []
    for index, row in enumerate(outcome.rows):
        begin = forks[index].position - len(row.request.prompt) if index in forks else 0
        own = row.tokens[begin:]
        text = printable("".join(token.text for token in own).replace("\n", " "))
        short = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        place = f" at token {begin}:" if index in forks else ""
        mark = "*" if index == outcome.chosen else " "
        lines.append(f"{mark} {'  ' * depth.get(index, 0)}{index}{place} {short}")
    votes = ", ".join(f"{printable(answer)} ({number})" for answer, number in outcome.votes.items())
    costs = f"{len(outcome.rows)} continuations, {outcome.forwards} forward passes"
    return "\n".join([*lines, f"{costs} | votes: {votes}" if votes else costs])
