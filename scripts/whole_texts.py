"""Compares methods that make whole texts, on tasks: scores, likelihoods, forward passes, seconds.

    python scripts/whole_texts.py [--model M] [--task NAME ...] [--items N] [--alpha A ...]

Greedy decoding; samples at temperature 1, alone, the likeliest of n and the majority of n; samples
at temperature 1 / alpha; power sampling, cut anywhere or where the entropy jumps. A forward pass is
a token drawn, whether or not its text is kept.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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


class Result(NamedTuple):
    """What a method gives for each of the I items, means over its texts, [I]."""

    score: Floats
    logprob: Floats  # ln p of a text, nats; NaN where an answer is no text's
    forwards: Floats


class Comparison:
    """Methods on the same questions, with the same engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = load(options.model)
        names = dict.fromkeys(options.task)
        read = (read_questions(self.model, find_task(n), "test", options.items) for n in names)
        self.questions = [question for task in read for question in task]
        self.options = options
        self.bootstrap = Bootstrap([[*names].index(q.task.name) for q in self.questions])
        capacity = choose_capacity(self.model, self.questions)
        recording = Recording(state=True)
        self.engine = Engine(
            self.model, slots=options.slots, capacity=capacity, recording=recording
        )

    def requests(self, sampler: Sampler, seeds: int = 1) -> Iterator[Request]:
        """So many for each question, whose index is the tag."""
        fitted = calibrate_sampler(sampler, self.model)
        for i, q in enumerate(self.questions):
            for seed in range(seeds):
                ends, stop = q.ends, q.task.stop
                yield Request(
                    *(q.prompt, fitted, q.max_new_tokens, q.item.id, seed, ends, stop), tag=i
                )

    def samples(self, sampler: Sampler, number: int) -> list[tuple[Row, ...]]:
        """So many of each question."""
        drawn = draw_samples(self.engine, self.requests(sampler), number)
        return [one.rows for one in sorted(drawn, key=lambda one: int(one.request.tag))]

    def result(self, texts: Sequence[Sequence[Row]], forwards: Floats) -> Result:
        """Of some texts of each question."""
        answers = [[self.extract(i, row) for row in rows] for i, rows in enumerate(texts)]
        logprob = [np.mean([len(r.tokens) * mean_logprob(r) for r in rows]) for rows in texts]
        return Result(self.score(answers), np.asarray(logprob), forwards)

    def extract(self, index: int, row: Row) -> str | None:
        """The answer in a text."""
        question = self.questions[index]
        return question.task.extract(question.item, row.text)

    def score(self, answers: Sequence[Sequence[str | None]]) -> Floats:
        """The mean score of some answers to each question."""
        pairs = zip(self.questions, answers, strict=True)
        return np.asarray([np.mean([q.task.score(q.item, a) for a in some]) for q, some in pairs])

    def power(self, alpha: float, cuts: Cuts) -> tuple[Result, float]:
        """Power sampling, and the share of its steps that were accepted."""
        options, requests = self.options, self.requests(power_sampler(alpha), self.options.seeds)
        run = sample_power(
            self.engine, requests, block=options.block, steps=options.steps, cuts=cuts
        )
        found = sorted(run, key=lambda chain: int(chain.request.tag))
        groups = [found[i : i + options.seeds] for i in range(0, len(found), options.seeds)]
        forwards = np.asarray([np.mean([chain.forwards for chain in group]) for group in groups])
        share = sum(chain.accepted for chain in found) / sum(chain.proposed for chain in found)
        return self.result([[chain.row for chain in group] for group in groups], forwards), share

    def methods(self) -> Iterator[tuple[str, Result, float]]:
        """Each method's name, result, and share of accepted steps: NaN where there are none."""
        options, samples = self.options, self.samples(power_sampler(1.0), max(SIZES))
        one = forwards_of(samples)
        answers = [[self.extract(i, row) for row in rows] for i, rows in enumerate(samples)]
        for k in SIZES:
            votes = self.score([rotating_votes(some, k) for some in answers])
            yield f"majority of {k}", Result(votes, np.nan * one, k * one), math.nan
        for k in SIZES:
            best = [
                [max((rows * 2)[i : i + k], key=mean_logprob) for i in range(len(rows))]
                for rows in samples
            ]
            yield f"likeliest of {k}", self.result(best, k * one), math.nan
        for name, sampler, number in (
            ("greedy", load_sampler("greedy"), 1),
            *((f"temperature 1/{a:g}", power_sampler(a), options.seeds) for a in options.alpha),
        ):
            rows = self.samples(sampler, number)
            yield name, self.result(rows, forwards_of(rows)), math.nan
        for alpha in options.alpha:
            for cuts in (anywhere, at_jumps):
                yield f"power {alpha:g}, cut {cuts.__name__}", *self.power(alpha, cuts)


def forwards_of(texts: Sequence[Sequence[Row]]) -> Floats:
    """The mean number of tokens of some texts of each question, [I]."""
    return np.asarray([np.mean([len(row.tokens) for row in rows]) for rows in texts])


HEADINGS = ("method", "score [95 %]", "ln p", "forwards", "over the majority", "accepted", "s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", nargs="+", default=["sums", "word-problems"])
    parser.add_argument("--items", type=int, default=50, help="of each task")
    parser.add_argument("--alpha", type=float, nargs="+", default=[2.0, 4.0])
    parser.add_argument("--block", type=int, default=16, help="tokens")
    parser.add_argument("--steps", type=int, default=4, help="after each block")
    parser.add_argument("--seeds", type=int, default=3, help="chains, and samples at 1 / alpha")
    parser.add_argument("--slots", type=int, default=64)
    options = parser.parse_args()
    return run_command(lambda: compare(Comparison(options)))


def compare(comparison: Comparison) -> int:
    """Prints the table. The majority's score is read at equal forward passes."""
    bootstrap, curve, lines = comparison.bootstrap, [], []
    before = time.perf_counter()
    for name, result, accepted in comparison.methods():
        seconds, before = time.perf_counter() - before, time.perf_counter()
        over = ""
        if name.startswith("majority"):
            curve.append(result)
        else:
            costs, scores = (
                np.stack(x) for x in ([r.forwards for r in curve], [r.score for r in curve])
            )
            over = str(bootstrap.over_curve(costs, scores, result.forwards, result.score))
        numbers = [
            bootstrap.mean(result.logprob),
            bootstrap.mean(result.forwards),
            accepted,
            seconds,
        ]
        logprob, forwards, share, spent = ("" if np.isnan(x) else f"{x:.2f}" for x in numbers)
        lines.append(
            (name, bootstrap.estimate(result.score), logprob, forwards, over, share, spent)
        )
    print(format_table(HEADINGS, lines))
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
