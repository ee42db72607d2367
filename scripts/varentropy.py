"""Measures what varentropy adds to entropy: the probability of the most likely token, and how often
that token follows.

    python scripts/varentropy.py --texts FILE ... [--prompts FILE] [--model MODEL]

The model reads the texts (.txt; the "prompt" of each record of a .jsonl file) and its own answers
to the prompts of `calibrate`, drawn by min-p. The first table compares the lowest and the highest
third by varentropy within a bin of entropy. The second has logistic regressions of "the argmax
follows" on entropy, varentropy and the probability of the argmax, cross-validated over texts. Needs
the extra `harness`, for scikit-learn.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.cli.status import show_status
from entropix_jax.engine.generation import Generation
from entropix_jax.engine.score import score_tokens
from entropix_jax.engine.state import Recording
from entropix_jax.errors import UserError, require
from entropix_jax.host.compile_cache import use_compilation_cache
from entropix_jax.host.files import read_text
from entropix_jax.lab.answers import AnswerRun, measuring_sampler, packaged_prompts, read_prompts
from entropix_jax.model.loading import LanguageModel, load

BINS = ((0.5, 1.5), (1.5, 2.5), (2.5, 3.5), (3.5, 4.5), (4.5, 6.0))  # bits
SAMPLES = 2000  # of the bootstrap over texts
PIECE = 400  # words of a text that count as one in the bootstrap


@dataclass(frozen=True)
class Points:
    """Measured tokens, arrays [n]."""

    entropy: np.ndarray  # bits
    varentropy: np.ndarray  # bits^2
    top_prob: np.ndarray
    is_top: np.ndarray  # bool: the argmax is the token that follows
    text: np.ndarray  # int, the number of the text

    def features(self, names: Sequence[str]) -> np.ndarray:
        """Standardised columns [n, len(names)]; the probability as its logit."""
        top = np.clip(self.top_prob, 1e-6, 1 - 1e-6)
        columns = {"h": self.entropy, "u": self.varentropy, "p": np.log(top / (1 - top))}
        chosen = np.stack([columns[name] for name in names], axis=1)
        return (chosen - chosen.mean(axis=0)) / chosen.std(axis=0)


def measure(model: LanguageModel, texts: Sequence[Sequence[int]], firsts: Sequence[int]) -> Points:
    """Reads texts as token ids; the tokens from each one's `firsts` on count."""
    sampler = measuring_sampler("min-p", model)
    rows = [
        (t.entropy, t.varentropy, t.top[0][2], t.top[0][0] == t.token_id, number)
        for number, (ids, first) in enumerate(zip(texts, firsts, strict=True))
        for t in score_tokens(model, ids, sampler, recording=Recording(top=1))
        if t.top is not None and t.position >= first
    ]
    entropy, varentropy, top_prob, is_top, text = np.array(rows, np.float64).T
    return Points(entropy, varentropy, top_prob, is_top.astype(bool), text.astype(int))


def read_texts(names: Sequence[str]) -> Iterator[str]:
    """Yields the texts of files, in pieces."""
    for name in names:
        path = Path(name)
        if path.suffix == ".jsonl":
            lines = read_text(path).splitlines()
            yield from (str(json.loads(line)["prompt"]) for line in lines if line.strip())
        else:
            words = read_text(path).split(" ")
            yield from (" ".join(words[i : i + PIECE]) for i in range(0, len(words), PIECE))


def answers(model: LanguageModel, prompts: str | None) -> tuple[list[list[int]], list[int]]:
    """Returns the model's answers with their prompts as token ids, and where each answer begins."""
    items = packaged_prompts(model) if prompts is None else read_prompts(Path(prompts))
    run = AnswerRun(model, items, seed=0, slots=len(items))
    rows = Generation(model, run.requests).run()
    texts = [[*row.request.prompt, *(token.token_id for token in row.tokens)] for row in rows]
    return texts, [len(row.request.prompt) for row in rows]


def by_thirds(points: Points) -> Table:
    """The table of bins of entropy, lowest and highest third of varentropy."""
    from sklearn.metrics import roc_auc_score

    table = Table("entropy, bits", "tokens", "p of the argmax", "argmax follows", "AUC of u")
    for low, high in BINS:
        here = (low <= points.entropy) & (points.entropy < high)
        if here.sum() < 60:
            continue
        ends = np.quantile(points.varentropy[here], [1 / 3, 2 / 3])
        parts = here & (points.varentropy <= ends[0]), here & (points.varentropy >= ends[1])
        prob = " to ".join(f"{points.top_prob[part].mean():.2f}" for part in parts)
        follows = " to ".join(f"{points.is_top[part].mean():.2f}" for part in parts)
        auc = roc_auc_score(points.is_top[here], points.varentropy[here])
        table.add_row(f"{low} to {high}", str(here.sum()), prob, follows, f"{auc:.2f}")
    return table


def by_predictor(points: Points) -> Table:
    """The table of cross-validated predictors: AUC, and bits per token gained over h alone."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import GroupKFold, cross_val_predict

    losses, table = {}, Table("predictors", "AUC", "gain over h, bits per token")
    number = min(10, len(set(points.text)))
    for names in ("h", "hu", "p", "pu", "hup"):
        predicted = cross_val_predict(
            LogisticRegression(),
            points.features(names),
            points.is_top,
            groups=points.text,
            cv=GroupKFold(number),
            method="predict_proba",
        )[:, 1]
        losses[names] = -np.log2(np.where(points.is_top, predicted, 1 - predicted))
        gains = losses["h"] - losses[names]
        auc = roc_auc_score(points.is_top, predicted)
        table.add_row(", ".join(names), f"{auc:.3f}", interval(gains, points.text))
    return table


def interval(values: np.ndarray, groups: np.ndarray) -> str:
    """A mean with its 95 % bootstrap interval over groups."""
    sums = np.bincount(groups, values)
    counts = np.bincount(groups)
    picks = np.random.default_rng(0).integers(0, len(sums), (SAMPLES, len(sums)))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--prompts", metavar="FILE", help="prompts to answer (default: ours)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args(argv)
    require("harness", "sklearn")
    use_compilation_cache()
    model = load(arguments.model, arguments.dtype)
    encoded = [model.tokenizer.encode(text, add_bos=True) for text in read_texts(arguments.texts)]
    texts = [ids for ids in encoded if len(ids) > 1]
    if arguments.texts and not texts:
        raise UserError("the texts are empty")
    console = Console(highlight=False, width=100)
    with show_status("answering the prompts ..."):
        answered = answers(model, arguments.prompts)
    for name, (ids, firsts) in {"texts": (texts, [1] * len(texts)), "answers": answered}.items():
        if not ids:
            continue
        with show_status(f"reading the {name} ..."):
            points = measure(model, ids, firsts)
        console.print(f"\n{name}: {len(points.entropy)} tokens")
        console.print(by_thirds(points))
        console.print(by_predictor(points))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
