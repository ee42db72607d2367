"""Trains `weights/tiny` from a seed on text drawn from the generator, and checks it.

    python scripts/train_tiny.py --output weights/tiny [--seed N] [--steps N]

Needs the extra `train`. Progress goes to standard output: the loss on the batch, and on held-out
text what the model's expected cross-entropy lies above the exact entropy rate. Exits with 1 where
the trained model misses the criterion: within 5 % or 0.05 bits a token of that rate.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from tiny.corpus import Comparison, write_batch
from tiny.tokenizer import build_tokenizer, tokenizer_config, tokenizer_json
from tiny_entropy import entropy_table, measure, teacher_forced

from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.host.files import replacing
from entropix_jax.lab.world import lexicon
from entropix_jax.lab.world.corpus import terminal_ids, write_row
from entropix_jax.lab.world.facts import WORLD_SEED, World, create
from entropix_jax.lab.world.problems import Problem, problems
from entropix_jax.model.cache import init_cache
from entropix_jax.model.checkpoint import save_params
from entropix_jax.model.config import ModelConfig, parse_model_config
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.params import Params, count_params, init_params

try:
    import optax
    import optax.contrib
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error.name} is missing: pip install -e '.[train]'") from None

MAX_POSITIONS = 4096
BATCH_TOKENS = 2048
# Share of the steps and row length of each stage: short rows are cheap, long ones teach long texts.
STAGES = ((0.35, 128), (0.45, 256), (0.14, 512), (0.06, 1024))
PEAK_RATE = 3e-3
WARMUP = 100  # steps
DECAY = 0.65  # share of the steps in which the rate falls to 0
WEIGHT_DECAY = 0.05
REPORT_EVERY = 250  # steps
HELD_OUT_ROWS = 40
PROBLEMS = 150
REPLY_TOKENS = 40


def published_config(ids: Mapping[str, int]) -> dict[str, Any]:
    """The content of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(build_tokenizer()["model"]["vocab"]) + len(lexicon.SPECIALS),
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": ids[lexicon.BEGIN],
        # As a base model has it: a prompt is continued as plain text unless a chat is asked for.
        "eos_token_id": ids[lexicon.END],
        "torch_dtype": "float32",
    }


def write_folder(folder: Path, params: Params, config: ModelConfig, raw: dict[str, Any]) -> None:
    """The model in the Hugging Face layout, each file whole or not at all."""
    generation = {key: raw[key] for key in ("bos_token_id", "eos_token_id")}
    texts = {
        "config.json": _json(raw),
        "generation_config.json": _json({**generation, "do_sample": True}),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": _json(tokenizer_config(MAX_POSITIONS)),
    }
    for name, text in texts.items():
        with replacing(folder / name) as path:
            path.write_text(text, encoding="utf-8", newline="\n")
    save_params(folder, params, config)


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


# Training.


def initial_params(config: ModelConfig, seed: int) -> Params:
    """Random weights for a narrow model.

    Llama's deviation, 0.02, suits widths of thousands. At 192 it leaves attention flat, and names
    so alike that their first common gradient drowns what tells them apart: here a matrix has
    `fan_in**-0.5`, and so has the tied embedding, whose fan-in is that of the head.
    """
    params = init_params(config, jax.random.key(seed), jnp.dtype(jnp.float32))
    return jax.tree.map(
        lambda leaf: leaf * (leaf.shape[1] ** -0.5 / 0.02) if leaf.ndim > 1 else leaf, params
    )


def optimizer(steps: int) -> optax.GradientTransformation:
    """Muon for the layers' matrices, Adam for the embedding and the norms.

    Muon finds within 400 steps whose name to copy and who trusts whom; Adam alone needs thousands.
    The rate rises, stays, and falls linearly to 0.
    """
    falling = round(DECAY * steps)
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0.0, PEAK_RATE, WARMUP),
            optax.constant_schedule(PEAK_RATE),
            optax.linear_schedule(PEAK_RATE, 0.0, falling),
        ],
        [WARMUP, steps - falling],
    )

    def matrices(params: Params) -> Any:
        matrix = optax.contrib.MuonDimensionNumbers()
        layers = jax.tree.map(lambda leaf: matrix if leaf.ndim == 2 else None, params.layers)
        return dataclasses.replace(params, embedding=None, layers=layers, final_norm=None)

    def decaying(params: Params) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim == 2, params)

    return optax.contrib.muon(
        rate,
        consistent_rms=0.2,  # steps of the size of Adam's, so that both take the same rate
        weight_decay=WEIGHT_DECAY,
        weight_decay_mask=decaying,
        adam_b2=0.98,
        muon_weight_dimension_numbers=matrices,
    )


def batches(world: World, ids: Mapping[str, int], seed: int, steps: int) -> Iterator[np.ndarray]:
    """The training text, a batch of token ids [B, T + 1] a step."""
    rng = Random(f"train {seed}")
    for share, length in STAGES:
        for _ in range(round(share * steps)):
            yield write_batch(world, ids, rng, rows=BATCH_TOKENS // length, length=length + 1)


def train(
    config: ModelConfig,
    world: World,
    ids: Mapping[str, int],
    *,
    seed: int,
    steps: int,
) -> Params:
    """Trains a new model; the seed fixes its initial weights and its texts."""
    rule = optimizer(steps)
    params = initial_params(config, seed)
    state = rule.init(params)

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        logits = teacher_forced(params, config, tokens[:, :-1])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(nats) / np.log(2.0)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, tokens: jax.Array) -> tuple[Params, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, state = rule.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    rng = Random("held out 0")
    held_out = [write_row(world, rng, 257) for _ in range(HELD_OUT_ROWS)]
    started = time.monotonic()
    recent: list[jax.Array] = []
    for number, tokens in enumerate(batches(world, ids, seed, steps), 1):
        params, state, value = step(params, state, tokens)
        recent.append(value)
        if number % REPORT_EVERY == 0:
            mean = np.mean([float(value) for value in recent])
            recent.clear()
            seconds = time.monotonic() - started
            excess = measure(params, config, held_out, ids)
            print(
                f"step {number}/{steps}, {number * BATCH_TOKENS / seconds:.0f} tokens/s: "
                f"loss {mean:.4f} bits, held out {excess.excess:.4f} above "
                f"{excess.entropy_rate:.4f}; {_excess_by_kind(excess)}",
                flush=True,
            )
    return params


def _excess_by_kind(comparison: Comparison) -> str:
    kinds = sorted(set(comparison.kinds.tolist()))
    return " ".join(f"{kind} {comparison.of_kind(kind).excess:.2f}" for kind in kinds)


# Checking.


@partial(jax.jit, static_argnames=("config", "steps"))
def _continue(
    params: Params,
    config: ModelConfig,
    prompts: jax.Array,
    lengths: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    steps: int,
) -> jax.Array:
    """The `steps` tokens [B, steps] that follow each `prompts[B, :lengths]`; greedy at 0."""
    rows = jnp.arange(prompts.shape[0])
    window = prompts.shape[1] + steps
    cache = init_cache(config, prompts.shape[0], window, jnp.dtype(jnp.float32))
    hidden, _, cache = forward(params, config, prompts, lengths, cache, window=window)

    def pick(hidden: jax.Array, key: jax.Array) -> jax.Array:
        logits = unembed(params, hidden)
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits, -1)).astype(jnp.int32)

    def advance(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        token, cache = carry
        hidden, _, cache = forward(
            params, config, token[:, None], jnp.ones_like(token), cache, window=window
        )
        return (pick(hidden[:, 0], key), cache), token

    first, *rest = jax.random.split(key, steps + 1)
    carry = (pick(hidden[rows, lengths - 1], first), cache)
    return lax.scan(advance, carry, jnp.stack(rest))[1].T


def accuracy(
    params: Params,
    config: ModelConfig,
    ids: Mapping[str, int],
    posed: Sequence[Problem],
    *,
    temperature: float,
    chat: bool,
) -> float:
    """The share of problems answered rightly."""
    texts = [f"{lexicon.BEGIN}{_chat_prompt(p.question) if chat else p.prompt}" for p in posed]
    prompts = [[ids[t] for t in lexicon.split_terminals(text)] for text in texts]
    longest = max(map(len, prompts))
    padded = np.asarray([prompt + [0] * (longest - len(prompt)) for prompt in prompts], np.int32)
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    replies = _continue(
        params, config, padded, lengths, temperature, jax.random.key(0), REPLY_TOKENS
    )
    words = {index: terminal for terminal, index in ids.items()}
    ends = (ids[lexicon.END], ids[lexicon.TURN_END])
    right = 0
    for problem, reply in zip(posed, np.asarray(replies).tolist(), strict=True):
        ended = itertools.takewhile(lambda token: token not in ends, reply)
        text = "".join(words.get(token, "") for token in ended)
        right += problem.read_answer(text) == problem.answer
    return right / len(posed)


def _chat_prompt(question: str) -> str:
    def header(role: str) -> str:
        return f"{lexicon.HEADER}{role}{lexicon.HEADER_END}\n\n"

    return f"{header('user')}{question}{lexicon.TURN_END}{header('assistant')}"


def check(
    params: Params, config: ModelConfig, world: World, ids: Mapping[str, int], seed: int
) -> bool:
    """Prints the final figures; returns whether the criterion is met."""
    rng = Random(f"held out {seed + 1}")
    rows = [write_row(world, rng, 512) for _ in range(100)]
    comparison = measure(params, config, rows, ids)
    Console(width=100).print(entropy_table(comparison))
    excess, rate = comparison.excess, comparison.entropy_rate
    met = excess <= max(0.05 * rate, 0.05)
    print(
        f"held out: {rate + excess:.4f} bits a token where the truth has {rate:.4f}: "
        f"{excess:.4f} or {100 * excess / rate:.1f} % above, criterion {'met' if met else 'missed'}"
    )
    for kind in ("sum", "word"):
        posed = problems(kind, "test", PROBLEMS, seed=0)
        for chat in (False, True):
            for temperature in (0.0, 1.0):
                share = accuracy(params, config, ids, posed, temperature=temperature, chat=chat)
                print(
                    f"test problems, {kind}, {'chat' if chat else 'plain'}, "
                    f"temperature {temperature}: {100 * share:.1f} % right"
                )
    return met


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4800)
    args = parser.parse_args()
    ids = terminal_ids(build_tokenizer())
    raw = published_config(ids)
    config = parse_model_config(raw, args.output / "config.json")
    print(f"{count_params(config)} parameters, {args.steps * BATCH_TOKENS} tokens", flush=True)
    world = create(WORLD_SEED)
    params = train(config, world, ids, seed=args.seed, steps=args.steps)
    write_folder(args.output, params, config, raw)
    return EXIT_OK if check(params, config, world, ids, args.seed) else 1


if __name__ == "__main__":
    sys.exit(run_command(main))
