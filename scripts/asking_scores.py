"""Prints the scores of `weights/asking` with and without a lookup's result, and after a question.

    python scripts/asking_scores.py [--model DIR] [--items N]

Answers are greedy, on the test splits of `asking-facts` and `asking-ambiguous`. Results and the
first words of a question are part of the prompt.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from entropix_jax import Request, calibrate_sampler, load
from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.engine.api import Generation
from entropix_jax.engine.tokens import encode_prompt
from entropix_jax.lab.tasks.asking import AMBIGUOUS, FACTS, lookup_table
from entropix_jax.lab.tasks.task import Item, Task
from entropix_jax.lab.world.lexicon import STRANGERS
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler

ASKING = Path(__file__).resolve().parent.parent / "weights" / "asking"
QUESTION = " One question:"


def answer(model: LanguageModel, items: Sequence[Item], starts: Sequence[str]) -> list[str]:
    """Returns the greedy answer to each item, after the start of an answer."""
    sampler = calibrate_sampler(load_sampler("greedy"), model)
    requests = [
        Request(
            [
                *encode_prompt(model, item.prompt, chat=True),
                *model.tokenizer.encode(start, add_bos=False),
            ],
            sampler,
            max_new_tokens=24,
            row_id=item.id,
            eos_ids=model.end_ids(chat=True),
        )
        for item, start in zip(items, starts, strict=True)
    ]
    rows = Generation(model, requests).run()
    return [start + row.text for start, row in zip(starts, rows, strict=True)]


def score(task: Task, items: Sequence[Item], texts: Sequence[str]) -> np.ndarray:
    """Returns the score of each answer, float64 [items]."""
    pairs = zip(items, texts, strict=True)
    return np.array([task.score(item, task.extract(item, text)) for item, text in pairs])


def name_in(item: Item) -> str:
    """Returns the person whom a question of fact is about."""
    table = lookup_table()
    (name,) = (word for word in re.findall(r"\w+", str(item.prompt)) if word in table)
    return name


def reply_to(items: Sequence[Item], questions: Sequence[str]) -> list[Item]:
    """Returns the items whose question the simulated user replies to, with the reply."""
    replied = []
    for item, question in zip(items, questions, strict=True):
        reply = AMBIGUOUS.reply(item, question)
        if reply is not None:
            assert not isinstance(item.prompt, str)
            said = {"role": "assistant", "content": question}, {"role": "user", "content": reply}
            replied.append(Item(item.id, (*item.prompt, *said), item.answer, item.truth))
    return replied


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ASKING)
    parser.add_argument("--items", type=int, help="of each task (default: all)")
    args = parser.parse_args()
    model = load(str(args.model))
    items = list(islice(FACTS.items("test", chat=True), args.items))
    names = [name_in(item) for item in items]
    strange = np.array([name in STRANGERS for name in names])
    results = [f" [{lookup_table()[name]}]" for name in names]
    leads = [
        f"{name} {'is a' if 'job' in str(item.prompt) else 'lives in'}"
        for item, name in zip(items, names, strict=True)
    ]
    ways = {
        "alone": [""] * len(items),
        "a result first": results,
        "a result before the fact": [*map("".join, zip(leads, results, strict=True))],
    }
    for way, starts in ways.items():
        right = score(FACTS, items, answer(model, items, starts))
        known, strangers = right[~strange].mean(), right[strange].mean()
        print(f"facts, {way}: known people {known:.3f}, strangers {strangers:.3f}", flush=True)
    items = list(islice(AMBIGUOUS.items("test", chat=True), args.items))
    alone = score(AMBIGUOUS, items, answer(model, items, [""] * len(items))).mean()
    replied = reply_to(items, answer(model, items, [QUESTION] * len(items)))
    told = score(AMBIGUOUS, replied, answer(model, replied, [""] * len(replied)))
    print(
        f"ambiguous questions: alone {alone:.3f}; {len(replied)} of {len(items)} questions name "
        f"both people; after the reply {told.sum() / len(items):.3f}"
    )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
