"""Compares ways to make whole texts: scores on tasks, likelihoods, forward passes and seconds.

    python scripts/whole_texts.py [--task NAME ...] [--items N] [--alpha A ...] [--help]

Samples at temperature 1, their majority and the likeliest of them; greedy decoding; samples at
temperature 1 / alpha; power sampling, cut anywhere or where the entropy jumps. A forward pass is a
token drawn, whether or not its text is kept.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.engine import Engine
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.state import Recording
from entropix_jax.lab.power import Cuts, anywhere, at_jumps, power_sampler, sample_power
from entropix_jax.lab.samples import draw_samples, mean_logprob
from entropix_jax.lab.statistics import Bootstrap, Floats, rotating_votes
from entropix_jax.lab.summary import format_table
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.lab.trials import choose_capacity, read_questions
from entropix_jax.model.loading import load
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler

SIZES = (1, 3, 5, 9, 15)  # samples that one answer is made of
HEADINGS = ("method", "score [95 %]", "ln p", "forwards", "over the majority", "accepted", "s")


class Comparison:
    """The table's lines; every method has the same questions and the same engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.model = options, load(options.model)
        read = (
            read_questions(self.model, find_task(n), "test", options.items) for n in options.task
        )
        self.questions = [question for task in read for question in task]
        self.bootstrap = Bootstrap([options.task.index(q.task.name) for q in self.questions])
        capacity, recording = choose_capacity(self.model, self.questions), Recording(state=True)
        self.engine = Engine(
            self.model, slots=options.slots, capacity=capacity, recording=recording
        )
        self.curve: list[tuple[Floats, Floats]] = []  # the majority's forwards and scores, [I]
        self.started = time.perf_counter()

    def lines(self) -> Iterator[Sequence[Any]]:
        """Runs the methods one after another."""
        seeds, alphas = self.options.seeds, self.options.alpha
        texts, cost = self.samples(power_sampler(1.0), max(SIZES))
        answers = [[self.extract(i, row) for row in rows] for i, rows in enumerate(texts)]
        for k in SIZES:
            score = self.score([rotating_votes(some, k) for some in answers])
            self.curve.append((k * cost, score))
            yield self.line(f"majority of {k}", score, k * cost)
        for k in SIZES:
            groups = [[(rows * 2)[i : i + k] for i in range(len(rows))] for rows in texts]
            best = [[max(group, key=mean_logprob) for group in some] for some in groups]
            yield self.of_texts(f"likeliest of {k}", best, k * cost)
        yield self.of_texts("greedy", *self.samples(load_sampler("greedy"), 1))
        for alpha in alphas:
            yield self.of_texts(f"t = 1/{alpha:g}", *self.samples(power_sampler(alpha), seeds))
        for alpha in alphas:
            yield self.power(alpha, anywhere)
            yield self.power(alpha, at_jumps)

    def requests(self, sampler: Sampler, seeds: int = 1) -> Iterator[Request]:
        """So many for each question, whose index is the tag."""
        fitted = calibrate_sampler(sampler, self.model)
        for i, q in enumerate(self.questions):
            shared = q.prompt, fitted, q.max_new_tokens, q.item.id
            for seed in range(seeds):
                yield Request(*shared, seed, q.ends, q.task.stop, tag=i)

    def samples(self, sampler: Sampler, number: int) -> tuple[list[tuple[Row, ...]], Floats]:
        """So many of each question, and the mean of their forwards."""
        drawn = draw_samples(self.engine, self.requests(sampler), number)
        found = sorted(drawn, key=lambda one: int(one.request.tag))
        return [one.rows for one in found], np.array([one.forwards / number for one in found])

    def power(self, alpha: float, cuts: Cuts) -> Sequence[Any]:
        """The line of power sampling."""
        o, requests = self.options, self.requests(power_sampler(alpha), self.options.seeds)
        run = sample_power(self.engine, requests, block=o.block, steps=o.steps, cuts=cuts)
        chains = sorted(run, key=lambda chain: int(chain.request.tag))
        cost = np.reshape([chain.forwards for chain in chains], (-1, o.seeds)).mean(axis=1)
        accepted = sum(c.accepted for c in chains) / max(sum(c.proposed for c in chains), 1)
        rows = [chain.row for chain in chains]
        texts = [rows[i : i + o.seeds] for i in range(0, len(rows), o.seeds)]
        return self.of_texts(f"power {alpha:g}, {cuts.__name__}", texts, cost, accepted)

    def extract(self, index: int, row: Row) -> str | None:
        """The answer in a text."""
        return self.questions[index].task.extract(self.questions[index].item, row.text)

    def score(self, answers: Sequence[Sequence[str | None]]) -> Floats:
        """The mean score of some answers to each question, [I]."""
        pairs = zip(self.questions, answers, strict=True)
        return np.array([np.mean([q.task.score(q.item, a) for a in some]) for q, some in pairs])

    def of_texts(
        self, name: str, texts: Sequence[Sequence[Row]], cost: Floats, accepted: float = np.nan
    ) -> Sequence[Any]:
        """The line of a method that makes texts, some for each question."""
        score = self.score([[self.extract(i, r) for r in rows] for i, rows in enumerate(texts)])
        sums = [np.mean([len(r.tokens) * mean_logprob(r) for r in rows]) for rows in texts]
        return self.line(name, score, cost, self.bootstrap.mean(np.array(sums)), accepted)

    def line(
        self,
        name: str,
        score: Floats,
        cost: Floats,
        logprob: float = np.nan,
        accepted: float = np.nan,
    ) -> Sequence[Any]:
        """One of the table; the difference from the majority is that at equal forward passes."""
        now, before = time.perf_counter(), self.started
        self.started = now
        costs, scores = (np.stack(found) for found in zip(*self.curve, strict=True))
        over = self.bootstrap.over_curve(costs, scores, cost, score)
        numbers = logprob, self.bootstrap.mean(cost), accepted, now - before
        told = ["" if np.isnan(x) else f"{x:.2f}" for x in numbers]
        return name, self.bootstrap.estimate(score), *told[:2], over, *told[2:]


def main() -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", nargs="+", default=["sums", "word-problems"])
    parser.add_argument("--items", type=int, default=100, help="of each task")
    parser.add_argument("--alpha", type=float, nargs="+", default=[2.0, 4.0])
    parser.add_argument("--block", type=int, default=16, help="tokens")
    parser.add_argument("--steps", type=int, default=4, help="after each block")
    parser.add_argument("--seeds", type=int, default=3, help="chains, and samples at 1 / alpha")
    parser.add_argument("--slots", type=int, default=64)
    comparison = parser.parse_args()
    return run_command(lambda: print_table(Comparison(comparison)))


def print_table(comparison: Comparison) -> int:
    """Prints the comparison."""
    print(format_table(HEADINGS, comparison.lines()))
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
