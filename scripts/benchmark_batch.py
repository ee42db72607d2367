"""Measures a batch run: prompts and budgets of many lengths through slots.

    python scripts/benchmark_batch.py [--model DIR] [--slots N] [--records N] [--transformers]

Runs random prompts of 8 to 512 tokens, each with a budget of 4 to 256 new ones, through the slots,
and prints how many slot-steps were of use; beside it a part of them one at a time, and, if asked
for, `transformers`' batched `generate`, which waits for the longest row of each batch. Without
--model it is `tiny`. What a single step of a batch costs, `benchmark.py` tells.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from entropix_jax.calibration.automatic import calibrate_sampler
from entropix_jax.commandline import EXIT_OK, run_command
from entropix_jax.decode_state import Recording
from entropix_jax.engine import Engine
from entropix_jax.errors import UserError
from entropix_jax.loading import LanguageModel, load
from entropix_jax.preparation import sampler_params as params_of
from entropix_jax.results import Request, Row
from entropix_jax.running import RunningRow, budget_of
from entropix_jax.sampler.presets import load_sampler

PROMPT, OUTPUT, CAPACITY = (8, 512), (4, 256), 1024
ALONE = 16  # records that are run one at a time, too


def requests_of(model: LanguageModel, number: int) -> list[Request]:
    """Random prompts and budgets."""
    rng = np.random.default_rng(0)
    vocab = model.tokenizer.vocab_size
    return [
        Request(
            rng.integers(0, vocab, rng.integers(*PROMPT, endpoint=True)).tolist(),
            str(i),
            int(rng.integers(*OUTPUT, endpoint=True)),
        )
        for i in range(number)
    ]


def run_through(
    model: LanguageModel, requests: list[Request], slots: int, sampler_name: str
) -> tuple[float, int, float]:
    """Seconds, tokens, and the share of slot-steps that were of use."""
    sampler = calibrate_sampler(load_sampler(sampler_name), model)
    params = params_of(model, sampler)
    engine = Engine(model, params, slots=slots, capacity=CAPACITY, recording=Recording())
    rows = [Row(request) for request in requests]

    def jobs() -> Iterator[RunningRow]:
        for i, row in enumerate(rows):
            budget = budget_of(model, row.request, CAPACITY)
            yield RunningRow(i, row, model, sampler, params, budget=budget, seed=0)

    started = time.perf_counter()
    for _ in engine.run(jobs()):
        pass
    seconds = time.perf_counter() - started
    tokens = sum(len(row.tokens) for row in rows)
    return seconds, tokens, engine.used


def transformers_model(folder: Path) -> Any:
    """The same model in `transformers`, float32."""
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise UserError(f"--transformers needs {error.name}: pip install -e '.[parity]'") from None
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def run_transformers(theirs: Any, requests: list[Request], slots: int) -> tuple[float, int, float]:
    """The same with `transformers`, batch after batch, each as long as its longest row."""
    import torch

    started = time.perf_counter()
    steps = 0
    for first in range(0, len(requests), slots):
        batch = requests[first : first + slots]
        longest = max(len(request.prompt) for request in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, request in enumerate(batch):
            ids[i, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[i, longest - len(request.prompt) :] = 1
        new = max(request.max_new_tokens for request in batch)
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            theirs.generate(ids, attention_mask=mask, max_new_tokens=new, **options)
        steps += new * len(batch)
    tokens = sum(request.max_new_tokens for request in requests)
    return time.perf_counter() - started, tokens, tokens / steps


def compare_runs(args: argparse.Namespace) -> None:
    """The slots, one at a time, and `transformers`, on the same records."""
    model = load(args.model, "float32")
    theirs = transformers_model(model.folder) if args.transformers else None
    requests = requests_of(model, args.records)
    table = Table("", "seconds", "tokens", "tok/s", "slot-steps of use", title=f"{model.folder}")

    def add(label: str, figures: tuple[float, int, float]) -> None:
        seconds, tokens, used = figures
        table.add_row(
            label, f"{seconds:.1f}", str(tokens), f"{tokens / seconds:.0f}", f"{used:.1%}"
        )

    for name in dict.fromkeys((args.sampler, "greedy")):
        for slots, some in ((args.slots, requests), (1, requests[:ALONE])):
            # The first run compiles for each length.
            run_through(model, some, slots, name)
            label = f"{name}, {slots} slots" if slots > 1 else f"{name}, {len(some)} one by one"
            add(label, run_through(model, some, slots, name))
    if theirs is not None:
        figures = run_transformers(theirs, requests, args.slots)
        add(f"transformers, batches of {args.slots}", figures)
    Console().print(table)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a model (default: tiny)")
    parser.add_argument("--sampler", default="entropix", help="a preset")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--records", type=int, default=600, help="prompts")
    parser.add_argument("--transformers", action="store_true", help="needs the extra 'parity'")
    args = parser.parse_args()
    compare_runs(args)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
