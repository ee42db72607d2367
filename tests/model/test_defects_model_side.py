"""Known defects of the published implementations, each with a test that fails if it exists.

This half concerns the model, the cache and the metrics. Tests have the numbers of the defects.
More cases of defects 1 and 10 are in `test_model`.
"""

from __future__ import annotations

import ast
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import entropix_jax
from entropix_jax.engine.decode import decode
from entropix_jax.engine.prefill import prefill
from entropix_jax.engine.state import LENGTH, Program, Recording
from entropix_jax.model.attention import attention_stats
from entropix_jax.model.cache import init_cache
from entropix_jax.model.config import ModelConfig
from entropix_jax.sampler.metrics import measure
from tests.support import reference
from tests.support.models import (
    TINY,
    all_metrics,
    generate,
    logits_of,
    random_params,
    random_tokens,
    run,
    sampler_params,
    start,
    teacher_forced,
)
from tests.support.samplers import LITERAL, PARTS, Job, params_of
from tests.support.samplers import start as start_jobs

PACKAGE = Path(entropix_jax.__file__).parent


@pytest.fixture(scope="module")
def params():
    return random_params(TINY)


def stats_of(scores: np.ndarray, n: int):
    """Returns the statistics of one row from scaled scores [L, N, S] with n valid keys."""
    valid = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, :] < n
    return attention_stats(jnp.asarray(scores[None], jnp.float32), valid)


def test_defect_02_a_score_of_zero_counts() -> None:
    """The mask was `scores != 0`. `test_properties_cache` checks that stale entries of a reused
    cache are not read."""
    zeros = stats_of(np.zeros((1, 1, 16)), 8)  # eight keys, all with score 0
    assert float(zeros.entropy[0, 0, 0]) == pytest.approx(3.0, abs=1e-6)


def test_defect_03_padding_is_not_measured() -> None:
    """Metrics included zero padding: 64 keys in 4,096 slots gave 11.98 bits instead of 5.34."""
    scores = np.zeros((1, 512, 4096))
    scores[:, :, :64] = np.random.default_rng(0).normal(size=(1, 512, 64))
    padded = reference.Attention(scores)
    assert padded.entropy.mean() == pytest.approx(11.98, abs=0.01)  # the defect, as published
    stats = stats_of(scores, 64)
    assert float(jnp.mean(stats.entropy)) == pytest.approx(5.34, abs=0.02)
    true = reference.Attention(scores[:, :, :64]).metrics(np.ones(1))
    metrics = measure(jnp.zeros((1, 1), jnp.float32), stats, jnp.ones((1, 1), jnp.float32))
    for name, value in true.items():
        assert float(getattr(metrics, name)[0]) == pytest.approx(value, abs=1e-4), name


def test_defect_04_attention_varentropy_is_a_variance_over_heads(params) -> None:
    """The variance was over an axis of length one, so always 0 or NaN."""
    logits, stats, _ = teacher_forced(params, TINY, random_tokens(TINY, 32)[None])
    got = float(all_metrics(TINY, logits[:, -1], stats).attn_varentropy[0])
    assert got > 0.01
    assert got == pytest.approx(np.asarray(stats.entropy, np.float64).var(axis=2).mean(), rel=1e-5)
    assert np.all(np.asarray(stats.varentropy) > 0)
    # Heads over 1 and over 4 keys have 0 and 2 bits: variance 1.
    two = stats_of(np.array([[[99.0, 0, 0, 0], [0, 0, 0, 0]]]), 4)
    metrics = measure(jnp.zeros((1, 1), jnp.float32), two, jnp.ones((1, 1), jnp.float32))
    assert float(metrics.attn_varentropy[0]) == pytest.approx(1.0, abs=1e-6)


def test_defect_05_every_layer_counts(params) -> None:
    """Statistics of all layers were computed, but only those of the last layer were used."""
    logits, stats, _ = teacher_forced(params, TINY, random_tokens(TINY, 32)[None])
    log_probs = jax.nn.log_softmax(jnp.asarray(logits[:, -1]))
    one_by_one = [measure(log_probs, stats, w[None]) for w in jnp.eye(3, dtype=jnp.float32)]
    together = all_metrics(TINY, logits[:, -1], stats)
    names = """attn_entropy attn_entropy_norm attn_varentropy agreement agreement_published
        interaction_strength"""
    for name in names.split():
        layers = [float(getattr(m, name)[0]) for m in one_by_one]
        assert len(set(layers)) == 3, name  # all layers differ
        assert float(getattr(together, name)[0]) == pytest.approx(np.mean(layers), abs=1e-5), name


def test_defect_10_no_numeric_defaults_of_arguments() -> None:
    modules = [f"model/{name}" for name in ("linear", "rope", "cache", "attention", "llama")]
    for module in (*modules, "sampler/metrics"):
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                defaults = [*node.args.defaults, *node.args.kw_defaults]
                values = [one.value for one in defaults if isinstance(one, ast.Constant)]
                assert not [value for value in values if type(value) in (int, float)]


def test_defect_12_rows_do_not_affect_each_other(params) -> None:
    """Metrics were averaged over the batch. Each row has its own values here, in every field."""
    texts = [random_tokens(TINY, n, seed=n) for n in (32, 3, 17)]
    batch, counts = np.zeros((3, 32), np.int32), jnp.asarray([32, 3, 17], jnp.int32)
    for row, text in enumerate(texts):
        batch[row, : len(text)] = text
    cache = init_cache(TINY, 3, 32, jnp.dtype(jnp.float32))
    hidden, stats, _ = run(params, TINY, jnp.asarray(batch), counts, cache, window=32)
    last = logits_of(params, hidden)[jnp.arange(3), counts - 1]
    together = all_metrics(TINY, last, stats)
    for row, text in enumerate(texts):
        logits, stats, _ = teacher_forced(params, TINY, text[None])
        alone = all_metrics(TINY, logits[:, -1], stats)
        for field in fields(alone):
            got, want = (np.asarray(getattr(m, field.name)) for m in (together, alone))
            assert got.shape == (3,)
            assert got[row] == pytest.approx(want[0], abs=2e-5), (row, field.name)


@pytest.mark.parametrize("steps", [9, 24])
def test_defect_14_the_loop_stays_within_the_cache(params, steps: int) -> None:
    """The loop ran past the end of the cache. A row that fills it waits for the other here."""
    prompts = [[int(t) for t in random_tokens(TINY, n, seed=n)] for n in (12, 3)]
    state, records = generate(params, TINY, prompts, [4, 9], capacity=16, steps=steps)
    assert np.asarray(state.cache.length).tolist() == [15, 11]
    assert np.asarray(state.status).tolist() == [LENGTH] * 2
    assert np.asarray(records.position)[np.asarray(records.live)].max() == 15
    roomy, _ = generate(params, TINY, prompts, [4, 9], capacity=32, steps=steps)
    np.testing.assert_array_equal(state.history, roomy.history[:, :16])
    assert np.asarray(state.history[0, :12]).tolist() == prompts[0]
    for tight, wide in zip(state.cache.keys, roomy.cache.keys, strict=True):
        np.testing.assert_allclose(tight[0, :, :15], wide[0, :, :15], atol=1e-5)


def test_defect_15_no_log_of_zero_and_one_unit() -> None:
    """log(0) made attention varentropy NaN, and nats were mixed with bits."""
    scores = np.full((1, 3, 8), -1e4)  # weights that float32 rounds to 0
    scores[0, 0, :1] = 0.0  # one key: 0 bits
    scores[0, 1, :2] = 0.0  # two: 1 bit
    scores[0, 2, :4] = 0.0  # four: 2 bits
    stats = stats_of(scores, 8)
    np.testing.assert_allclose(stats.entropy[0, 0], [0.0, 1.0, 2.0], atol=1e-6)
    np.testing.assert_allclose(stats.varentropy[0, 0], 0.0, atol=1e-6)
    log_probs = jnp.asarray([[0.0, -jnp.inf, -jnp.inf], [math.log(0.5), math.log(0.5), -jnp.inf]])
    both = jax.tree.map(lambda x: jnp.concatenate([x, x]), stats)
    metrics = measure(log_probs, both, jnp.ones((2, 1), jnp.float32))
    np.testing.assert_allclose(metrics.entropy, [0.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(metrics.varentropy, [0.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(metrics.attn_varentropy, 2 / 3, atol=1e-6)
    for leaf in jax.tree.leaves(metrics):
        assert np.all(np.isfinite(leaf))


def test_defect_16_every_field_of_a_dataclass_is_annotated() -> None:
    """A field without an annotation is a class attribute: the constructor cannot set it."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef) and "dataclass" in "".join(
            map(ast.unparse, node.decorator_list)
        ):
            assert not [item for item in node.body if isinstance(item, ast.Assign)], node.name
    # Every field of the configuration can be set, and has no nonzero default.
    for field in fields(ModelConfig):
        value: Any = object()
        assert getattr(replace(TINY, **{field.name: value}), field.name) is value
        assert not getattr(ModelConfig, field.name, None), field.name


def primitives(jaxpr) -> set[str]:
    """Returns the names of all operations of a traced function and its inner functions."""
    names: set[str] = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names |= primitives(inner)
    return names


def on_host(names: set[str]) -> set[str]:
    return {name for name in names if "callback" in name or "debug" in name or "feed" in name}


def test_defect_17_a_step_has_no_host_callback(params) -> None:
    """Forward, metrics, regime, draw and commit are one compiled program without callbacks."""

    def planted(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: None, x)
        return jax.lax.cond(x > 0, lambda: jax.pure_callback(lambda y: y, x, x), lambda: x)

    found = on_host(primitives(jax.make_jaxpr(jax.jit(planted))(1.0).jaxpr))
    assert len(found) >= 2  # the search finds callbacks, also in inner functions

    job = Job([1, 2, 3], params_of(LITERAL, num_layers=TINY.num_layers))
    state = start_jobs(TINY, params, [job, replace(job, prompt=[4])], 16)
    step: Any = decode
    for lanes in (False, True):
        program = Program(PARTS, 16, lanes=lanes, recording=Recording(top=2, layers=True))
        options: Any = {"config": TINY, "max_steps": 5, "program": program}
        jaxpr = step.trace(params, state, jnp.int32(5), **options).jaxpr
        names = primitives(jaxpr.jaxpr)
        assert {"while", "dot_general", "top_k"} <= names
        assert not on_host(names)
        assert not jaxpr.effects


def test_defect_17_other_values_need_no_other_program(params) -> None:
    """Thresholds, samplers, keys, prompts and lengths are values that share one program."""

    def once(prompts: list[list[int]], budget: int, preset: str, seed: int) -> None:
        state = start(params, TINY, prompts, [budget] * len(prompts), capacity=16)
        settings = sampler_params(TINY, len(prompts), preset)
        bound = settings.conditions.bound + 0.1 * seed
        state = replace(
            state,
            keys=jnp.full_like(state.keys, seed),
            settings=replace(settings, conditions=replace(settings.conditions, bound=bound)),
            eos_ids=jnp.full_like(state.eos_ids, seed),
        )
        program = Program(PARTS, 16)
        decode(params, state, jnp.int32(budget), config=TINY, max_steps=24, program=program)

    compiled: list[Any] = [decode, prefill]
    once([[1, 2, 3], [4]], 5, "greedy", 0)
    before = [function._cache_size() for function in compiled]
    once([[4, 5], [1, 2, 3, 4, 5, 6]], 8, LITERAL, 1)
    once([[9], [9, 9]], 1, "temperature", 2)
    assert [function._cache_size() for function in compiled] == before
