"""Compares ways to make whole texts: scores on tasks, likelihoods, forward passes and seconds.

    python scripts/whole_texts.py [--task NAME ...] [--items N] [--alpha A ...] [--help]

Samples at temperature 1, their majority and the likeliest of them; greedy decoding; samples at
temperature 1 / alpha; power sampling, cut anywhere or where the entropy jumps. A forward pass is a
token drawn, whether or not its text is kept.
"""

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.engine.engine import Engine
from entropix_jax.engine.preparation import calibrate_sampler
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.state import Recording
from entropix_jax.lab.markdown import format_table
from entropix_jax.lab.power import Cuts, anywhere, at_jumps, power_sampler, sample_power
from entropix_jax.lab.samples import draw_samples, mean_logprob
from entropix_jax.lab.statistics import Bootstrap, Floats, majority_vote, rotate
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.lab.trials import choose_capacity, read_questions
from entropix_jax.model.loading import load
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler

SIZES = (1, 3, 5, 9, 15)  # samples that one answer is made of
HEADINGS = ("method", "score [95 %]", "ln p", "forwards", "over the majority", "seconds")
OPTIONS = {"items": 100, "block": 48, "steps": 4, "slots": 64}

Texts = Sequence[Sequence[Row]]  # some of each question
Answers = Sequence[Sequence[str | None]]  # found in them


class Comparison:
    """The table's lines; every method has the same questions and the same engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.model = options, load(options.model)
        tasks = [find_task(name) for name in options.task]
        read = (read_questions(self.model, task, "test", options.items) for task in tasks)
        self.questions = [question for task in read for question in task]
        self.bootstrap = Bootstrap([tasks.index(question.task) for question in self.questions])
        capacity, state = choose_capacity(self.model, self.questions), Recording(state=True)
        self.engine = Engine(self.model, slots=options.slots, capacity=capacity, recording=state)
        self.curve: list[tuple[Floats, Floats]] = []  # the majority's forwards and scores, [I]
        self.started = time.perf_counter()

    def lines(self) -> Iterator[Sequence[Any]]:
        """Runs the methods one after another."""
        most, alphas = max(SIZES), self.options.alpha
        texts, cost = self.samples(power_sampler(1.0), most)
        answers = self.answers(texts)
        may_vote = [question.task.votes for question in self.questions]  # else a single sample
        for k in SIZES:
            voters = [k if may else 1 for may in may_vote]
            groups = [*map(rotate, answers, voters)]
            votes = [[*map(majority_vote, some)] for some in groups]
            yield self.line(f"majority of {k}", (), k * cost, votes)
        for k in SIZES:
            twice = [[*rows, *rows] for rows in texts]
            best = [[max(r[i : i + k], key=mean_logprob) for i in range(most)] for r in twice]
            yield self.line(f"likeliest of {k}", best, k * cost)
        yield self.line("greedy", *self.samples(load_sampler("greedy"), 1))
        for alpha in alphas:
            yield self.line(f"temperature 1/{alpha:g}", *self.samples(power_sampler(alpha), most))
        for alpha, cuts in itertools.product(alphas, (anywhere, at_jumps)):
            yield self.line(f"power {alpha:g}, {cuts.__name__}", *self.chains(alpha, cuts))

    def requests(self, sampler: Sampler) -> Iterator[Request]:
        """One for each question, whose index is the tag."""
        fitted = calibrate_sampler(sampler, self.model)
        for i, q in enumerate(self.questions):
            budget, stop = q.max_new_tokens, q.task.stop
            yield Request(q.prompt, fitted, budget, q.item.id, 0, q.ends, stop, tag=i)

    def samples(self, sampler: Sampler, number: int) -> tuple[Texts, Floats]:
        """So many of each question, and the mean of their forwards, [I]."""
        drawn = draw_samples(self.engine, self.requests(sampler), number)
        found = sorted(drawn, key=lambda one: int(one.request.tag))
        return [one.rows for one in found], np.array([one.forwards / number for one in found])

    def chains(self, alpha: float, cuts: Cuts) -> tuple[Texts, Floats]:
        """The text of a chain of each question, and its forwards, [I]."""
        requests, o = self.requests(power_sampler(alpha)), self.options
        run = sample_power(self.engine, requests, block=o.block, steps=o.steps, cuts=cuts)
        found = sorted(run, key=lambda chain: int(chain.request.tag))
        return [[one.row] for one in found], np.array([float(one.forwards) for one in found])

    def answers(self, texts: Texts) -> Answers:
        """What is found in some texts of each question."""
        pairs = zip(self.questions, texts, strict=True)
        return [[q.task.extract(q.item, row.text) for row in rows] for q, rows in pairs]

    def line(self, name: str, texts: Texts, cost: Floats, votes: Answers = ()) -> Sequence[Any]:
        """A line of the table. What is over the majority is so at equal forward passes."""
        mean, before, self.started = self.bootstrap.mean, self.started, time.perf_counter()
        pairs = zip(self.questions, votes or self.answers(texts), strict=True)
        score = np.array([np.mean([q.task.score(q.item, a) for a in some]) for q, some in pairs])
        if votes:
            self.curve.append((cost, score))
        costs, scores = (np.stack(found) for found in zip(*self.curve, strict=True))
        over = self.bootstrap.over_curve(costs, scores, cost, score)
        sums = [[sum(token.logprob for token in row.tokens) for row in rows] for rows in texts]
        logprob = f"{mean(np.array([np.mean(some) for some in sums])):.2f}" if texts else ""
        numbers = f"{mean(cost):.1f}", "" if votes else over, f"{self.started - before:.1f}"
        return name, self.bootstrap.estimate(score), logprob, *numbers


def compare() -> int:
    """Prints the table that the command line asks for."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", nargs="+", default=["sums", "word-problems"])
    parser.add_argument("--alpha", type=float, nargs="+", default=[2.0, 4.0])
    for name, value in OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    print(format_table(HEADINGS, Comparison(parser.parse_args()).lines()))
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(run_command(compare))
