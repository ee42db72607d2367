"""Compares methods that make whole texts, on tasks, by score, likelihood and forward passes.

    python scripts/whole_texts.py [--model M] [--task NAME ...] [--items N] [--alpha A ...]

Greedy decoding; samples at temperature 1, alone, the likeliest of n and by majority; samples at
temperature 1 / alpha; power sampling, which cuts anywhere or where the entropy jumps. A forward
pass is a token drawn, for a text that is kept or not.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.engine import Engine
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.state import Recording
from entropix_jax.lab.power import anywhere, at_jumps, power_sampler, sample_power
from entropix_jax.lab.samples import Samples, draw_samples, mean_logprob
from entropix_jax.lab.statistics import Bootstrap, Floats, rotating_votes
from entropix_jax.lab.summary import format_table
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.lab.trials import Question, choose_capacity, read_questions
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler

SIZES = (1, 3, 5, 9, 15)


class Result(NamedTuple):
    """A method's results on the I items, means over samples: [I] each."""

    score: Floats
    logprob: Floats  # ln p of a text, nats
    forwards: Floats


def requests(model: LanguageModel, questions: Sequence[Question], sampler: Sampler,
             chains: int = 1) -> Iterator[Request]:
    """So many for each question; the tag is the question's index."""
    fitted = calibrate_sampler(sampler, model)
    for index, q in enumerate(questions):
        for seed in range(chains):
            yield Request(
                q.prompt, fitted, q.max_new_tokens, row_id=q.item.id, seed=seed, eos_ids=q.ends,
                stop=q.task.stop, tag=index,
            )
