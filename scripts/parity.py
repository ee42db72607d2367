"""Compares this model with `transformers` at a full shape: logits at every position, greedy tokens.

    python scripts/parity.py [--model MODEL | --families] [--prompt-tokens N] [--new-tokens N]

Needs the extra `parity`. MODEL is smollm2, tiny, a folder or a GGUF file; at a path where nothing
is yet `transformers` writes a folder with random weights in Llama-3.2-1B's shape (2.5 GB), and the
embedded model's tokenizer with them, so that the commands run on it too. With `--families` a
random model of each other family that is read, of 4 layers. Exits with 1 where the two do not
agree.
"""

import argparse
import gc
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from llama_1b import LLAMA_3_2_1B, transformers_config
from rich.console import Console
from rich.table import Table
from tiny_entropy import teacher_forced

from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.engine.api import Generation
from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.request import Request
from entropix_jax.host.resources import resource_folder
from entropix_jax.model.find import SMOLLM2, TINY
from entropix_jax.model.loading import LanguageModel, load, open_model, resolve_model
from entropix_jax.sampler.presets import load_sampler

try:
    import torch
    import transformers
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error.name} is missing: pip install -e '.[parity]'") from None

LOGIT_TOLERANCE = 1e-4  # of the largest logit

SMALL = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 96, "tie_word_embeddings": True},
    "smollm3": {"no_rope_layer_interval": 4},
}


def write_random_checkpoint(folder: Path, family: str | None = None) -> None:
    """A bfloat16 checkpoint with random weights, written by `transformers`: in Llama-3.2-1B's
    shape, or of a family, none of its biases 0 and none of its norms 1."""
    torch.manual_seed(0)
    if family is None:
        raw = transformers_config(LLAMA_3_2_1B) | {"bos_token_id": 128000, "eos_token_id": 128001}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**raw))
    else:
        config = transformers.AutoConfig.for_model(family, **SMALL, **FAMILIES[family])
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resource_folder("weights") / "tiny" / name, folder / name)


def reference(path: Path, prompt: np.ndarray, new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """`transformers`' float32 logits [T, V] over the prompt, and the tokens that it adds
    greedily."""
    folder, file = (path.parent, path.name) if path.is_file() else (path, None)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, local_files_only=True
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
    logits = teacher_forced(model.params, model.config, jnp.asarray(tokens[None], jnp.int32))
    return np.asarray(logits[0])


def compare(path: Path, prompt: np.ndarray, new_tokens: int, title: str = "") -> tuple[Table, bool]:
    """The table of agreement, and whether everything agrees."""
    logits, tokens = reference(path, prompt, new_tokens)
    gc.collect()
    model = load(str(path), "float32")
    ours = all_logits(model, prompt)
    error = np.abs(ours - logits).max(axis=-1)
    best = np.partition(logits, -2, axis=-1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > 2 * error
    same = ours.argmax(-1) == logits.argmax(-1)

    greedy = calibrate_sampler(load_sampler("greedy"), model)
    request = Request(prompt.tolist(), greedy, max_new_tokens=new_tokens)
    (row,) = Generation(model, [request]).run()
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

    title = f"{title}float32, {len(prompt)} tokens, against transformers"
    table = Table("quantity", "value", title=title)
    table.add_row("largest difference of a logit", f"{error.max():.2e}")
    table.add_row("median over positions of the largest", f"{np.median(error):.2e}")
    table.add_row("largest logit", f"{np.abs(logits).max():.2f}")
    table.add_row("positions with a clear top token", f"{clear.sum()} of {len(prompt)}")
    table.add_row("of those, same top token", f"{(same & clear).sum()}")
    table.add_row("greedy tokens", verdict)
    close = error.max() <= LOGIT_TOLERANCE * np.abs(logits).max()
    passed = bool(close and same[clear].all() and agrees)
    return table, passed


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", help="a model; written there if missing")
    what.add_argument("--families", action="store_true", help="small models of Llama's kin")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    passed = True
    with tempfile.TemporaryDirectory() as scratch:
        for family in FAMILIES if args.families else [None]:
            path = Path(args.model or Path(scratch) / (family or "random-1b"))
            if args.model in (SMOLLM2, TINY) or path.exists():
                path = resolve_model(args.model)
            else:
                write_random_checkpoint(path, family)
                gc.collect()
            vocab = open_model(path).config.vocab_size
            prompt = np.random.default_rng(0).integers(0, vocab, args.prompt_tokens)
            title = f"{family}, " if family else ""
            table, agrees = compare(path, prompt, args.new_tokens, title)
            Console(width=100).print(table)
            passed = passed and agrees
    verdict = "yes" if passed else "NO"
    print(f"agreement: {verdict} (tolerance {LOGIT_TOLERANCE:g} of the largest logit)")
    return EXIT_OK if passed else 1


if __name__ == "__main__":
    sys.exit(run_command(main))
