"""Compares this model with `transformers` at a full shape: logits at every position, greedy tokens.

    python scripts/parity.py [--model DIR] [--prompt-tokens N] [--new-tokens N]

Needs the extra `parity`. DIR is a checkpoint; where it does not exist yet, `transformers` writes
one there with random weights in Llama-3.2-1B's shape (2.5 GB), and the embedded model's tokenizer
beside them, so that the commands run on it too. Exits with 1 where the two do not agree.
"""

import argparse
import gc
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks.shape import LLAMA_3_2_1B, transformers_config
from rich.console import Console
from rich.table import Table

from entropix_jax.cache import init_cache
from entropix_jax.commandline import EXIT_OK, run_command
from entropix_jax.config import load_model_config
from entropix_jax.generation import Generation
from entropix_jax.loading import LanguageModel, load
from entropix_jax.model import forward, unembed
from entropix_jax.resources import resource_folder
from entropix_jax.results import Request

try:
    import torch
    import transformers
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error.name} is missing: pip install -e '.[parity]'") from None

LOGIT_TOLERANCE = 1e-3


def write_random_checkpoint(folder: Path) -> None:
    """A bfloat16 checkpoint with random weights, written by `transformers`."""
    torch.manual_seed(0)
    raw = transformers_config(LLAMA_3_2_1B) | {"bos_token_id": 128000, "eos_token_id": 128001}
    config = transformers.LlamaConfig(**raw)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resource_folder("weights") / "tiny" / name, folder / name)


def reference(folder: Path, prompt: np.ndarray, new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """`transformers`' float32 logits [T, V] over the prompt, and the tokens that it adds
    greedily."""
    model = transformers.LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    ids = torch.tensor(prompt[None], dtype=torch.long)
    with torch.no_grad():
        logits = model(ids).logits[0].numpy()
        model.generation_config.eos_token_id = None
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return logits, text[0, len(prompt) :].numpy()


def all_logits(model: LanguageModel, tokens: np.ndarray) -> np.ndarray:
    """Our float32 logits [T, V] at every position of one text."""
    length = len(tokens)
    cache = init_cache(model.config, 1, length, model.precision.activations)

    @jax.jit
    def hidden_states(params: Any, tokens: jax.Array) -> jax.Array:
        count = jnp.full(1, length, jnp.int32)
        return forward(params, model.config, tokens, count, cache, window=length)[0][0]

    hidden = hidden_states(model.params, jnp.asarray(tokens[None], jnp.int32))
    head = jax.jit(unembed)
    # In slices: the logits of a whole prompt are larger than a layer's weights.
    parts = [np.asarray(head(model.params, hidden[i : i + 64])) for i in range(0, length, 64)]
    return np.concatenate(parts)


def compare(folder: Path, prompt: np.ndarray, new_tokens: int) -> tuple[Table, bool]:
    """The table of agreement, and whether everything agrees."""
    logits, tokens = reference(folder, prompt, new_tokens)
    gc.collect()
    model = load(str(folder), "float32")
    ours = all_logits(model, prompt)
    error = np.abs(ours - logits).max(axis=-1)
    best = np.partition(logits, -2, axis=-1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > 2 * error
    same = ours.argmax(-1) == logits.argmax(-1)

    request = Request(prompt.tolist(), "0", new_tokens)
    row = Generation(model, [request], "greedy", ignore_eos=True).run()[0]
    generated = np.array([token.token_id for token in row.tokens])
    parted = np.flatnonzero(generated != tokens)
    agrees, verdict = True, f"all {new_tokens} equal"
    if parted.size:
        # Past a tie the texts differ: all that counts is that it was one.
        text = np.concatenate([prompt, tokens[: parted[0]]])
        row_logits = all_logits(model, text)[-1]
        gap = float(row_logits[generated[parted[0]]] - row_logits[tokens[parted[0]]])
        agrees = gap < 2 * error.max()
        verdict = f"{parted[0]} equal, then a gap of {gap:.1e}: {'a tie' if agrees else 'no tie'}"

    table = Table("quantity", "value", title=f"float32, {len(prompt)} tokens, against transformers")
    table.add_row("largest difference of a logit", f"{error.max():.2e}")
    table.add_row("median over positions of the largest", f"{np.median(error):.2e}")
    table.add_row("largest logit", f"{np.abs(logits).max():.2f}")
    table.add_row("positions with a clear top token", f"{clear.sum()} of {len(prompt)}")
    table.add_row("of those, same top token", f"{(same & clear).sum()}")
    table.add_row("greedy tokens", verdict)
    passed = error.max() <= LOGIT_TOLERANCE and bool(same[clear].all()) and agrees
    return table, passed


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint; written there if missing")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch) / "random-1b"
        if not folder.exists():
            write_random_checkpoint(folder)
            gc.collect()
        vocab = load_model_config(folder).vocab_size
        prompt = np.random.default_rng(0).integers(0, vocab, args.prompt_tokens)
        table, passed = compare(folder, prompt, args.new_tokens)
    Console(width=100).print(table)
    print(f"agreement: {'yes' if passed else 'NO'} (tolerance {LOGIT_TOLERANCE:g})")
    return EXIT_OK if passed else 1


if __name__ == "__main__":
    sys.exit(run_command(main))
