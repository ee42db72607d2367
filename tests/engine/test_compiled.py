"""Compiled decode steps: copies, aliasing, and the bytes read. Nothing is timed."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from entropix_jax.engine.decode import decode
from entropix_jax.engine.memory import plan_memory
from entropix_jax.engine.slots import Layout, empty_slots
from entropix_jax.engine.state import DecodeState, Program
from entropix_jax.model.cache import KVCache, init_cache
from entropix_jax.model.linear import Weight, arranged, quantized
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.params import Params, ParamSpec, param_specs
from entropix_jax.model.precision import choose_precision
from entropix_jax.sampler.mechanisms import MECHANISMS
from tests.support.models import tiny_config
from tests.support.samplers import FEW, LANES, LITERAL, params_of

pytestmark = pytest.mark.slow

# Only the weights have these shapes. Rows are widened in several blocks, and the MLP is wide enough
# for its vectors to be split. Programs are compiled from shapes, without allocating any array.
CONFIG = tiny_config(
    vocab_size=1280, width=1024, mlp_width=4352, num_layers=2, num_heads=8, num_kv_heads=4,
    head_dim=128, tied_head=False,
)  # fmt: skip
WINDOW = CAPACITY = 512
TYPES = ("float32", "bfloat16", "int8")
# Weight type, slots, and whether the step runs the lanes. Each compiles in about ten seconds.
STEPS = (("float32", 1, False), ("bfloat16", 1, False), ("bfloat16", 4, True), ("int8", 4, True))
# Operations that neither compute nor copy.
_FREE = ("parameter", "get-tuple-element", "tuple", "while", "conditional", "call", "bitcast",
         "opt-barrier", "constant")  # fmt: skip


def params_in(weights: str) -> Params:
    """Returns the shapes of weights, as loaded on a CPU from a folder of that type."""
    float32 = jnp.dtype("float32")

    def weight(spec: ParamSpec) -> Any:
        def stored() -> Weight:
            array = jnp.zeros(spec.shape, float32)
            if weights != "int8":
                return arranged(array.astype(weights))
            return arranged(quantized(array) if array.ndim == 2 else array)

        return jax.eval_shape(stored)

    return jax.tree.map(weight, param_specs(CONFIG))


def state_of(batch: int, capacity: int = CAPACITY) -> DecodeState:
    return empty_slots(
        CONFIG,
        Layout(batch, LANES, 1),
        params_of(LITERAL, num_layers=CONFIG.num_layers),
        mechanisms=MECHANISMS,
        capacity=capacity,
        dtype=jnp.dtype("float32"),
    )


def lowered(weights: str, batch: int, lanes: bool, capacity: int = CAPACITY) -> Any:
    return decode.lower(
        params_in(weights),
        state_of(batch, capacity),
        jnp.int32(4),
        config=CONFIG,
        max_steps=4,
        program=Program(FEW, WINDOW, lanes=lanes),
    )


@cache
def compiled(weights: str, batch: int, lanes: bool, capacity: int = CAPACITY) -> Any:
    return lowered(weights, batch, lanes, capacity).compile()


def instructions(text: str) -> list[tuple[str, str, str]]:
    """Returns the name, shape and operation of each instruction outside fusions."""
    found, fused = [], False
    for line in text.splitlines():
        if line and not line.startswith(" "):
            fused = "fused_computation" in line or "wrapped_" in line
        match = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\(%", line)
        if match and not fused:  # a tuple has several shapes
            shapes = re.findall(r"\w+\[[\d,]*\]", match[2])
            found += [(match[1], shape, match[3]) for shape in shapes]
    return found


@pytest.mark.parametrize(("weights", "batch", "lanes"), STEPS)
def test_nothing_large_is_copied(weights: str, batch: int, lanes: bool) -> None:
    """No operation outputs a whole weight matrix or its transpose, in any type. Cache arrays are
    written but never copied, neither before a write nor for a read. The memory plan is a lower
    bound of the memory that the step uses."""
    program = compiled(weights, batch, lanes)
    made = [
        (operation, shape[shape.index("[") :])
        for _, shape, operation in instructions(program.as_text())
        if operation not in _FREE
    ]
    shapes = {x.shape for x in jax.tree.leaves(params_in(weights)) if x.ndim == 2}
    assert len(shapes) >= 5
    wanted = {f"[{a},{b}]" for a, b in shapes} | {f"[{b},{a}]" for a, b in shapes}
    assert [one for one in made if one[1] in wanted] == []
    keys = state_of(batch).cache.keys[0]
    wanted = {f"[{','.join(map(str, shape))}]" for shape in (keys.shape, keys.shape[1:])}
    operations = [operation for operation, shape in made if shape in wanted]
    assert len(operations) >= 2 * CONFIG.num_layers
    assert "copy" not in operations
    arguments = jax.tree.leaves((state_of(batch), params_in(weights)))
    resident = sum(x.size * x.dtype.itemsize for x in arguments)
    taken = resident + program.memory_analysis().temp_size_in_bytes
    precision = choose_precision(weights, "cpu")
    plan = plan_memory(CONFIG, precision, slots=batch + LANES, capacity=CAPACITY, mesh=None)
    assert 0.5 * taken < plan.total <= taken


def test_narrow_products_have_two_operands() -> None:
    """Products with narrow weights take a vector and the weight, and no widened copy."""
    text = compiled("bfloat16", 1, False).as_text()
    products = re.findall(r" fusion\(([^)]*)\), kind=kLoop[^\n]*_widening_product[^\n]*dot_", text)
    assert len(products) >= 8 * CONFIG.num_layers + 1
    assert [operands for operands in products if operands.count("%") != 2] == []


@pytest.mark.parametrize(("weights", "batch", "lanes"), STEPS)
def test_no_reshape_is_left_between_layers(weights: str, batch: int, lanes: bool) -> None:
    """The residual stream has the shape of the products. With separate axes for rows and tokens,
    XLA moves a reshape through one layer in each round of its passes, up to 25 rounds. The step of
    1B then took 29 s to compile instead of 18."""
    text = lowered(weights, batch, lanes).as_text()
    sums = re.findall(rf"stablehlo\.add .* : tensor<([0-9x]+)x{CONFIG.width}xf32>", text)
    assert set(sums) == {str(batch + LANES if lanes else batch)}


@pytest.mark.parametrize(("lanes", "capacity"), [(False, CAPACITY), (True, CAPACITY + 128)])
def test_the_state_is_written_in_place(lanes: bool, capacity: int) -> None:
    """Donation aliases all bytes of the state, also where not all slots are read."""
    weights, batch = "float32", 1
    state = sum(x.nbytes for x in jax.tree.leaves(state_of(batch, capacity)))
    program = compiled(weights, batch, lanes, capacity)
    assert program.memory_analysis().alias_size_in_bytes == state


@pytest.mark.parametrize(
    ("weights", "batch"), [*((one, 1) for one in TYPES), ("bfloat16", 4), ("int8", 4)]
)
def test_a_step_reads_each_weight_once(weights: str, batch: int) -> None:
    """XLA counts the bytes of a forward pass: the weights as stored, and less than eight times the
    cache for everything else. A widened copy would add twice the weights."""
    params = params_in(weights)
    cache = init_cache(CONFIG, batch, WINDOW, jnp.dtype("float32"))
    one = jnp.ones((batch, 1), jnp.int32)

    def step(params: Params, tokens: jax.Array, cache: KVCache) -> Any:
        hidden, stats, cache = forward(
            params, CONFIG, tokens, jnp.ones(batch, jnp.int32), cache, window=WINDOW
        )
        return unembed(params, hidden[:, 0]), stats, cache

    program = jax.jit(step, donate_argnums=2).lower(params, one, cache).compile()
    read = (program.cost_analysis() or {})["bytes accessed"]
    weight_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    cache_bytes = sum(x.nbytes for x in (*cache.keys, *cache.values))
    assert weight_bytes < read < weight_bytes + 8 * cache_bytes
