"""Trains `weights/tiny` from a seed on text drawn from the generator, and checks it.

    python scripts/train_tiny.py --output weights/tiny [--seed N] [--steps N]
    python scripts/train_tiny.py --output weights/asking --world asking --steps 600

The model of the asking world starts from the weights in `weights/tiny`, and has its own tokenizer.
Needs the extra `train`. Progress goes to standard output: the loss on the batch, and on held-out
text what the model's expected cross-entropy lies above the exact entropy rate. Exits with 1 where
the trained model misses the criterion: within 5 % or 0.05 bits a token of that rate.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny.corpus import encode_row, is_chosen, terminal_ids, write_row
from tiny.tokenizer import build_tokenizer, tokenizer_config, tokenizer_json
from tiny.weights import init_params
from tiny_entropy import TINY, WORLDS, format_means, measure, teacher_forced

from entropix_jax import Request, calibrate_sampler
from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.engine.api import Generation
from entropix_jax.engine.tokens import encode_prompt
from entropix_jax.host.files import replacing
from entropix_jax.lab.world import lexicon
from entropix_jax.lab.world.facts import World
from entropix_jax.lab.world.problems import Problem, problems, read_answer
from entropix_jax.model.checkpoint import open_folder, read_params, save_params
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.config_file import parse_model_config
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.model.params import Params, count_params
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler

try:
    import optax
    import optax.contrib
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error.name} is missing: pip install -e '.[train]'") from None

MAX_POSITIONS = 4096
BATCH_TOKENS = 2048
# Share of the steps and row length of each stage: short rows are cheap, long ones teach long texts.
STAGES = ((0.35, 128), (0.45, 256), (0.14, 512), (0.06, 1024))
PEAK_RATE, PEAK_RATE_FROM_TINY = 3e-3, 1.5e-3
WARMUP = 100  # steps
DECAY = 0.65  # share of the steps in which the rate falls to 0
WEIGHT_DECAY = 0.05
REPORT_EVERY = 250  # steps
HELD_OUT_ROWS = 40
PROBLEMS = 150
REPLY_TOKENS = 40


def published_config(
    ids: Mapping[str, int], tokenizer: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """The content of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokenizer["model"]["vocab"]) + len(lexicon.SPECIALS),
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
        "torch_dtype": dtype,
    }


def write_folder(
    folder: Path,
    params: Params,
    config: ModelConfig,
    raw: dict[str, Any],
    terminals: Iterable[str],
) -> None:
    """The model in the Hugging Face layout, each file whole or not at all."""
    generation = {key: raw[key] for key in ("bos_token_id", "eos_token_id")}
    texts = {
        "config.json": _json(raw),
        "generation_config.json": _json({**generation, "do_sample": True}),
        "tokenizer.json": tokenizer_json(terminals),
        "tokenizer_config.json": _json(tokenizer_config(MAX_POSITIONS)),
    }
    for name, text in texts.items():
        with replacing(folder / name) as path:
            path.write_text(text, encoding="utf-8", newline="\n")
    save_params(folder, jax.tree.map(lambda leaf: leaf.astype(config.dtype), params), config)


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


def params_of_tiny(config: ModelConfig, seed: int, tokenizer: Mapping[str, Any]) -> Params:
    """The weights of `weights/tiny` with random embeddings of the tokens that it does not have.

    The embedding of a stranger's name has the mean and the covariance of the known names. So what
    the model does with any name, such as copying it, works for these names from the start.
    """
    files = open_folder(TINY)
    tiny = read_params(files.tensors, files.config, "float32")
    rows = token_ids(json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8")))
    shared = {i: rows[token] for token, i in token_ids(tokenizer).items() if token in rows}
    embedding = np.array(initial_params(config, seed).embedding)
    embedding[[*shared]] = tiny.embedding[np.asarray([*shared.values()])]
    ids = terminal_ids(tokenizer, lexicon.ASKING_TERMINALS)
    count = len(lexicon.PEOPLE)
    mixture = np.random.default_rng(seed).normal(size=(len(lexicon.STRANGERS), count)) / count**0.5
    for lead in ("", " "):
        known = embedding[[ids[lead + name] for name in lexicon.PEOPLE]]
        mean = known.mean(axis=0)
        strangers = [ids[lead + name] for name in lexicon.STRANGERS]
        embedding[strangers] = mean + mixture @ (known - mean)
    return dataclasses.replace(tiny, embedding=jnp.asarray(embedding))


def token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Returns the ids of all tokens, from the content of `tokenizer.json`."""
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    return {**tokenizer["model"]["vocab"], **added}


def optimizer(peak: float, steps: int) -> optax.GradientTransformation:
    """Muon for the layers' matrices, Adam for the embedding and the norms.

    Muon finds within 400 steps whose name to copy and who trusts whom; Adam alone needs thousands.
    The rate rises, stays, and falls linearly to 0.
    """
    falling = round(DECAY * steps)
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, WARMUP),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, falling),
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


def batches(
    world: World, ids: Mapping[str, int], seed: int, steps: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The training text, for each step token ids [B, T + 1] and which of them are predicted."""
    rng = Random(f"train {seed}")
    for share, length in STAGES:
        for _ in range(round(share * steps)):
            rows = [write_row(world, rng, length + 1) for _ in range(BATCH_TOKENS // length)]
            tokens = np.asarray([encode_row(row, ids) for row in rows], np.int32)
            yield tokens, np.asarray([*map(is_chosen, rows)])


def train(
    params: Params,
    config: ModelConfig,
    world: World,
    ids: Mapping[str, int],
    *,
    peak: float,
    seed: int,
    steps: int,
) -> Params:
    """Trains a model from its initial weights, on texts that the seed fixes."""
    rule = optimizer(peak, steps)
    state = rule.init(params)

    def loss(params: Params, tokens: jax.Array, chosen: jax.Array) -> jax.Array:
        logits = teacher_forced(params, config, tokens[:, :-1])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(nats, where=chosen[:, 1:]) / np.log(2.0)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, state: Any, tokens: jax.Array, chosen: jax.Array
    ) -> tuple[Params, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, tokens, chosen)
        updates, state = rule.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    rng = Random("held out 0")
    held_out = [write_row(world, rng, 257) for _ in range(HELD_OUT_ROWS)]
    started = time.monotonic()
    recent: list[jax.Array] = []
    for number, (tokens, chosen) in enumerate(batches(world, ids, seed, steps), 1):
        params, state, value = step(params, state, tokens, chosen)
        recent.append(value)
        if number % REPORT_EVERY == 0:
            mean = np.mean([float(value) for value in recent])
            recent.clear()
            seconds = time.monotonic() - started
            found = measure(params, config, held_out, ids)
            by_kind = found.groupby("kind")["KL"].mean().map("{:.2f}".format)
            print(
                f"step {number}/{steps}, {number * BATCH_TOKENS / seconds:.0f} tokens/s: "
                f"loss {mean:.4f} bits, held out {found['KL'].mean():.4f} above "
                f"{found['true h'].mean():.4f}; {' '.join(map(' '.join, by_kind.items()))}",
                flush=True,
            )
    return params


# Checking.


def accuracy(
    model: LanguageModel, posed: Sequence[Problem], preset: Sampler, *, chat: bool
) -> float:
    """Returns the share of problems that the model answers rightly."""
    sampler = calibrate_sampler(preset, model)
    prompts = [problem.question if chat else problem.prompt for problem in posed]
    requests = [
        Request(
            encode_prompt(model, prompt, chat=chat),
            sampler,
            max_new_tokens=REPLY_TOKENS,
            row_id=str(number),
            eos_ids=model.end_ids(chat=chat),
        )
        for number, prompt in enumerate(prompts)
    ]
    rows = Generation(model, requests).run()
    pairs = zip(posed, rows, strict=True)
    return sum(read_answer(one.kind, row.text) == one.answer for one, row in pairs) / len(posed)


def check(model: LanguageModel, world: World, ids: Mapping[str, int], seed: int) -> bool:
    """Prints the final figures; returns whether the criterion is met."""
    rng = Random(f"held out {seed + 1}")
    rows = [write_row(world, rng, 512) for _ in range(100)]
    comparison = measure(model.params, model.config, rows, ids)
    print(format_means(comparison))
    excess, rate = comparison["KL"].mean(), comparison["true h"].mean()
    met = bool(excess <= max(0.05 * rate, 0.05))
    print(
        f"held out: {rate + excess:.4f} bits a token where the truth has {rate:.4f}: "
        f"{excess:.4f} or {100 * excess / rate:.1f} % above, criterion {'met' if met else 'missed'}"
    )
    sampled = load_sampler("temperature").with_values({"base.temperature": 1.0})
    presets = {"greedy": load_sampler("greedy"), "temperature 1": sampled}
    for kind in ("sum", "word"):
        posed = problems(kind, "test", PROBLEMS, seed=0)
        for chat in (False, True):
            for name, preset in presets.items():
                share = accuracy(model, posed, preset, chat=chat)
                print(
                    f"test problems, {kind}, {'chat' if chat else 'plain'}, {name}: "
                    f"{100 * share:.1f} % right"
                )
    return met


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4800)
    parser.add_argument("--world", choices=WORLDS, default="tiny")
    args = parser.parse_args()
    world, terminals = WORLDS[args.world]
    tokenizer = build_tokenizer(terminals)
    ids = terminal_ids(tokenizer, terminals)
    is_tiny = args.world == "tiny"
    raw = published_config(ids, tokenizer, "float32" if is_tiny else "float16")
    config = parse_model_config(raw, args.output / "config.json")
    print(f"{count_params(config)} parameters, {args.steps * BATCH_TOKENS} tokens", flush=True)
    if is_tiny:
        params, peak = initial_params(config, args.seed), PEAK_RATE
    else:
        params, peak = params_of_tiny(config, args.seed, tokenizer), PEAK_RATE_FROM_TINY
    params = train(params, config, world, ids, peak=peak, seed=args.seed, steps=args.steps)
    write_folder(args.output, params, config, raw, terminals)
    return EXIT_OK if check(load(str(args.output)), world, ids, args.seed) else 1


if __name__ == "__main__":
    sys.exit(run_command(main))
