"""This package's own steps: decoding, prompts, the sampler by itself, compiling."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Timed, seconds_of
from entropix_jax.config import ModelConfig
from entropix_jax.decode import decode, prefill
from entropix_jax.decode_state import DecodeState, Recording, init_state
from entropix_jax.engine import DECODE_WINDOW
from entropix_jax.linear import Weight, arranged, quantized
from entropix_jax.loading import LanguageModel
from entropix_jax.params import Params, init_params
from entropix_jax.precision import INT8, Precision, choose_precision
from entropix_jax.preparation import MAX_STEPS, PREFILL_WINDOW, bucket, for_rows
from entropix_jax.sampler.keys import row_key
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import Rows, init_sampler_state
from entropix_jax.sampler.step import choose
from entropix_jax.stats import AttnStats

_NOBODY = jnp.full(1, -1, jnp.int32)


def sampler_params(
    name: str, config: ModelConfig, batch: int, *, branching: bool = True
) -> SamplerSettings:
    """A preset's parameters for each of `batch` rows; its thought is of any three tokens."""
    sampler = load_sampler(name)
    if not branching:
        sampler = sampler.with_values({"branch.per_row": 0})
    params = sampler.settings(
        num_layers=config.num_layers, epsilon=2.0**-23, encode=lambda text: [1, 2, 3]
    )
    return for_rows(params, batch)


def fresh_state(
    config: ModelConfig, precision: Precision, batch: int, context: int, capacity: int
) -> tuple[DecodeState, np.ndarray]:
    """Rows with `context` random tokens each, none of them cached, and those tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (batch, context))
    state = init_state(
        config,
        tokens.tolist(),
        [capacity - context] * batch,
        np.stack([row_key(0, str(row)) for row in range(batch)]),
        capacity=capacity,
        dtype=precision.activations,
    )
    return state, tokens


@jax.jit
def _filled(state: DecodeState, length: jax.Array) -> DecodeState:
    """Rows whose caches hold `length` tokens: random numbers, which cost what true ones would."""
    keys = jax.random.split(jax.random.key(1), 2 * len(state.cache.keys))

    def noise(key: jax.Array, like: jax.Array) -> jax.Array:
        return jax.random.normal(key, like.shape, like.dtype)

    half = len(state.cache.keys)
    cache = replace(
        state.cache,
        keys=tuple(map(noise, keys[:half], state.cache.keys)),
        values=tuple(map(noise, keys[half:], state.cache.values)),
        length=jnp.full_like(state.cache.length, length),
    )
    return replace(state, cache=cache)


@dataclass(frozen=True)
class Ours:
    """A model and how it is run: a loaded one, or one with random weights, whose `source` is
    None."""

    config: ModelConfig
    params: Params
    precision: Precision
    source: Path | None

    @classmethod
    def of(cls, model: LanguageModel) -> "Ours":
        return cls(model.config, model.params, model.precision, model.folder)

    @classmethod
    def random(cls, config: ModelConfig, weights: str) -> "Ours":
        precision = choose_precision(weights)
        dtype = precision.activations if weights == INT8 else precision.weights
        params = init_params(config, jax.random.key(0), dtype)

        def weight(array: jax.Array) -> Weight:
            small = quantized(array) if weights == INT8 and array.ndim == 2 else array
            return arranged(small, precision.activations)

        return cls(config, jax.tree.map(weight, params), precision, None)

    def decode(
        self,
        sampler: str,
        batch: int,
        context: int,
        capacity: int,
        steps: int,
        *,
        branching: bool = False,
    ) -> Timed:
        """A function that runs `steps` steps from `context` tokens on, and gives the seconds of
        one."""
        state, _ = fresh_state(self.config, self.precision, batch, context, capacity)
        state = _filled(state, jnp.int32(context - 1))
        params = sampler_params(sampler, self.config, batch, branching=branching)
        window = min(bucket(context + steps, DECODE_WINDOW), capacity)
        run = partial(
            decode,
            config=self.config,
            window=window,
            max_steps=max(MAX_STEPS, steps),
            recording=Recording(),
        )

        def seconds() -> float:
            nonlocal state
            state = _rewound(state, context - 1)

            def go() -> Any:
                nonlocal state
                state, records, _ = run(self.params, params, _NOBODY, state, jnp.int32(steps))
                return records

            elapsed = seconds_of(go)
            return elapsed / steps

        return seconds

    def prefill(self, batch: int, tokens: int) -> Timed:
        """A function that reads a prompt into an empty cache, and gives the seconds of it."""
        capacity = bucket(tokens + 1, PREFILL_WINDOW)
        state, ids = fresh_state(self.config, self.precision, batch, tokens, capacity)
        count = jnp.full(batch, tokens, jnp.int32)
        prompt = jnp.asarray(ids, jnp.int32)
        window = min(bucket(tokens, PREFILL_WINDOW), capacity)
        run = partial(prefill, config=self.config, window=window)

        def seconds() -> float:
            nonlocal state
            state = _rewound(state, 0)

            def go() -> DecodeState:
                nonlocal state
                state = run(self.params, state, prompt, count)
                return state

            return seconds_of(go)

        return seconds

    def sampler(self, name: str, batch: int) -> Timed:
        """A function that chooses tokens from random logits, and gives the seconds of one step of
        it: all that a step does besides the model."""
        config = self.config
        params = sampler_params(name, config, batch, branching=False)
        state = init_sampler_state(batch, config.vocab_size, params.mechanisms)
        logits = 3.0 * jax.random.normal(jax.random.key(2), (batch, config.vocab_size))
        heads = jnp.ones((batch, config.num_layers, config.num_heads), jnp.float32)
        layers = jnp.ones((batch, config.num_layers), jnp.float32)
        stats = AttnStats(heads, heads, layers, layers, jnp.full(batch, 128.0, jnp.float32))
        length = jnp.full(batch, 128, jnp.int32)
        rows = Rows(
            running=jnp.ones(batch, bool),
            keys=jnp.asarray(np.stack([row_key(0, str(row)) for row in range(batch)])),
            history=jnp.zeros((batch, 256), jnp.int32),
            length=length,
            generated=length - 100,
            remaining=length,
            asks=jnp.zeros(batch, bool),
        )
        run = jax.jit(choose)
        times = 8

        def seconds() -> float:
            return (
                seconds_of(lambda: [run(logits, stats, params, state, rows) for _ in range(times)])
                / times
            )

        return seconds

    def products(self, rows: int) -> Timed:
        """A function that multiplies `rows` vectors with each matrix, nothing else, and gives the
        seconds of it."""
        matrices = _matrices(self.params)
        dtype = self.precision.activations

        @jax.jit
        def multiply(matrices: list[jax.Array]) -> list[jax.Array]:
            ones = {x.shape[1]: jnp.ones((rows, x.shape[1]), dtype) for x in matrices}
            return [jnp.dot(ones[x.shape[1]], x.astype(dtype).T) for x in matrices]

        return lambda: seconds_of(lambda: multiply(matrices))

    def compiling(self, batch: int, context: int, prompt: int) -> Callable[[], dict[str, float]]:
        """A function that traces, lowers and compiles a step and a prompt's reading, and gives the
        seconds of each, and the bytes that each takes for the time of its run."""
        state, _ = fresh_state(self.config, self.precision, batch, context, 2048)
        sampler = sampler_params("entropix", self.config, batch)
        tokens, count = jnp.zeros((batch, prompt), jnp.int32), jnp.zeros(batch, jnp.int32)
        shapes = {"config": self.config, "window": DECODE_WINDOW}
        steps = {"max_steps": MAX_STEPS, "recording": Recording()}
        lowerings: dict[str, Any] = {
            "step": lambda: decode.lower(
                self.params, sampler, _NOBODY, state, jnp.int32(1), **shapes, **steps
            ),
            "prefill": lambda: prefill.lower(self.params, state, tokens, count, **shapes),
        }

        def seconds() -> dict[str, float]:
            jax.clear_caches()
            figures: dict[str, float] = {}
            for name, lower in lowerings.items():
                started = time.perf_counter()
                program = lower().compile()
                figures[name] = time.perf_counter() - started
                memory: Any = program.memory_analysis()
                figures[f"bytes of the {name}"] = memory.temp_size_in_bytes
            return figures

        return seconds

    def step_bytes(self, batch: int, context: int) -> int:
        """What a step must read: every weight once, and the used part of each row's cache."""
        weights = sum(x.nbytes for x in jax.tree.leaves(self.params))
        slot = 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim
        return weights + batch * context * slot * self.precision.activations.itemsize

    def token_flops(self, context: int) -> int:
        """Floating-point operations of one token: two a weight of the matrices, and attention's."""
        matrices = sum(x.size for x in _matrices(self.params))
        heads = self.config.num_layers * self.config.num_heads * self.config.head_dim
        return 2 * matrices + 4 * heads * context


def _matrices(params: Params) -> list[jax.Array]:
    """The arrays that matrices lie in."""
    return [x for x in jax.tree.leaves(params) if x.ndim == 2]


def _rewound(state: DecodeState, length: int) -> DecodeState:
    """The same rows at an earlier length: the slots past it are free to be written again."""
    cache = replace(state.cache, length=jnp.full(state.finish.shape, length, jnp.int32))
    sampler = init_sampler_state(*state.sampler.last.logits.shape)
    state = replace(state, cache=cache, sampler=sampler, finish=jnp.zeros_like(state.finish))
    return jax.block_until_ready(state)
