"""NaN and infinity are reported, and never become a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.__main__ import main
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.results import Row
from entropix_jax.errors import UserError
from entropix_jax.model.attention import attend, attention_stats
from entropix_jax.model.cache import init_cache
from entropix_jax.model.llama import forward
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.model.params import Params
from entropix_jax.model.write import append
from tests.support import reference
from tests.support.model_folders import (
    config_of_folder,
    poisoned,
    sharp_params,
    token_ids,
    write_model,
)
from tests.support.models import load_params
from tests.support.runs import Spec, requests, run_rows, run_specs
from tests.support.samplers import LITERAL

SHAPE = config_of_folder()
NUMBERS = (jnp.nan, jnp.inf, -jnp.inf)
PROMPT = [token_ids()["<|begin_of_text|>"], 40, 41, 42, 43, 44]
AT = 3  # index of the bad token in the prompt


def overflowing(params: Params) -> Params:
    """Changes weights so that only one token has a nonzero first channel, in every layer, and its
    values overflow in the first layer."""
    embedding = params.embedding.at[:, 0].set(0.0)
    embedding = embedding.at[PROMPT[AT]].set(0.0).at[PROMPT[AT], 0].set(1000.0)
    first, *others = [
        replace(one, output=one.output.at[0].set(0.0), down=one.down.at[0].set(0.0))
        for one in params.layers
    ]
    first = replace(first, value=first.value.at[:, 0].set(3e38))
    return replace(params, embedding=embedding, layers=(first, *others))


def run_of(model: LanguageModel) -> Any:
    requests = [Spec(PROMPT, "0", 20), Spec([*PROMPT[:AT], 50], "1", 20)]
    return run_specs(model, requests, LITERAL, ignore_eos=True).run()


@pytest.mark.parametrize(
    ("number", "dtype"), [*zip(NUMBERS, ["float32", "bfloat16", "int8"], strict=True)]
)
def test_non_finite_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: float, dtype: str
) -> None:
    def change(params: Params) -> Params:
        one = params.layers[1]
        one = replace(one, up=one.up.at[4, 9].set(number))
        return replace(params, layers=(params.layers[0], one))

    folder = write_model(tmp_path, change)
    error = r"model.safetensors: tensor 'model.layers.1.mlp.up_proj.weight' holds NaN or infinity, "
    with pytest.raises(UserError, match=error + r"first at \[4, 9\]$"):
        load_params(folder, SHAPE, dtype, check=True)
    load_params(folder, SHAPE, dtype)
    assert main(["generate", "--model", str(folder), "--prompt", "x", "--check"]) == 2
    assert "up_proj.weight' holds NaN or infinity" in capsys.readouterr().err
    assert load(str(write_model(tmp_path / "sound")), dtype, check=True).folder


def test_non_finite_branch_is_never_best(tmp_path: Path) -> None:
    """The other branches have the same scores as in a sound model."""
    (whole, _) = run_of(load(str(write_model(tmp_path / "sound"))))
    forks = [one.branches for one in whole.tokens if one.branches]
    taken = {*PROMPT, *(one.token_id for one in whole.tokens)}
    lost = {t for fork in forks for one in fork if not one.chosen for t in one.tokens} - taken
    bad = load(str(write_model(tmp_path / "bad", poisoned(min(lost)))))
    (row, _) = run_of(bad)
    assert [one.token_id for one in row.tokens] == [one.token_id for one in whole.tokens]
    for fork, sound in zip((t.branches for t in row.tokens if t.branches), forks, strict=True):
        for one, other in zip(fork, sound, strict=True):
            at = other.tokens.index(min(lost)) + 1 if min(lost) in other.tokens else None
            assert one == (other if at is None else replace(one, tokens=other.tokens[:at]))
            assert (one.score is None) == (at is not None)


def in_one_slot(model: LanguageModel, *specs: Spec) -> list[Row]:
    """Runs rows in the same slot, one after another."""
    engine = Engine(model, slots=1, capacity=256)
    return run_rows(engine, requests(model, specs, ignore_eos=True))


@pytest.mark.parametrize("change", [overflowing, poisoned(PROMPT[AT])], ids=["overflow", "poison"])
def test_non_finite_values_fail_one_row(tmp_path: Path, change: Callable[[Params], Params]) -> None:
    """The next rows in its slot equal the row alone, bit for bit, after a shared prompt, too."""
    model = load(str(write_model(tmp_path / "model", change)))
    sound = Spec([*PROMPT[:AT], 51], "1", 30)
    fails = Spec(PROMPT * 8, "0", 30)
    *bad, good, again = in_one_slot(model, fails, fails, sound, sound)
    for row in bad:
        assert row.error == f"NaN or infinite logits at position {8 * len(PROMPT)}"
        assert row.tokens == []
    (alone,) = in_one_slot(model, sound)
    assert len(alone.tokens) == 30
    for row in (good, again):
        assert [replace(token, row=0) for token in row.tokens] == alone.tokens


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_non_finite_value_is_not_cached(number: float, dtype: str) -> None:
    """The key of a non-finite value is NaN instead, and all other entries are unchanged."""
    key, value = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 3, 2, 4)), dtype)
    at = ((0, 1, 0, 3), (1, 2, 1, 0))  # row, token, head and channel; the second is padding
    bad = value
    for place in at:
        bad = bad.at[place].set(number)
    cached = (jnp.zeros((2, 2, 5, 4), dtype),) * 2
    start, count = jnp.array([1, 2]), jnp.array([3, 2])
    want_keys, want_values = append(cached, key, value, start, count)
    keys, values = append(cached, key, bad, start, count)
    place = (0, 0, 2, 3)  # row, head, position and channel
    want = want_keys.at[place].set(jnp.nan), want_values.at[place].set(0.0)
    for x, y in zip((keys, values), want, strict=True):
        np.testing.assert_array_equal(x.astype(jnp.float32), y.astype(jnp.float32))
    assert keys.dtype == values.dtype == dtype


def test_tokens_before_a_bad_one_are_sound() -> None:
    """Attention is causal, so their hidden states do not depend on it."""
    tokens = jnp.array([[5, 6, 7, 8, 9]], jnp.int32)
    cache = init_cache(SHAPE, 1, 16, jnp.dtype(jnp.float32))
    count = jnp.array([5], jnp.int32)
    params = sharp_params()
    want, _, _ = forward(params, SHAPE, tokens, count, cache, window=16)
    hidden, _, grown = forward(poisoned(7)(params), SHAPE, tokens, count, cache, window=16)
    np.testing.assert_array_equal(hidden[0, :2], want[0, :2])
    assert np.isnan(hidden[0, 2:]).all()
    assert all(np.isfinite(x).all() for x in grown.values)
    assert all(np.isnan(x[:, :, 2]).all() for x in grown.keys)


def test_attention_over_16k_keys() -> None:
    """Softmax, mixing and statistics in float32 agree with float64."""
    rng = np.random.default_rng(0)
    slots, heads, dim = 16_384, 4, 16
    query = rng.normal(size=(1, 1, heads, dim)).astype(np.float32)
    keys = rng.normal(size=(1, 2, slots, dim)).astype(np.float32)
    values = rng.normal(size=(1, 2, slots, dim)).astype(np.float32) + 1.0
    length = slots - 3
    at = jnp.full((1, 1), length - 1, jnp.int32)
    arrays = jnp.asarray(query), jnp.asarray(keys), jnp.asarray(values)
    mixed, scores = attend(*arrays, at, window=slots)
    wide_k = np.repeat(keys[0].astype(np.float64), 2, axis=0)[:, :length]
    wide_v = np.repeat(values[0].astype(np.float64), 2, axis=0)[:, :length]
    exact = np.einsum("nh,nsh->ns", query[0, 0].astype(np.float64), wide_k) / np.sqrt(dim)
    want = reference.Attention(exact[None])
    mix = np.einsum("ns,nsh->nh", want.weights[0], wide_v).reshape(-1)
    np.testing.assert_allclose(np.asarray(mixed)[0, 0], mix, atol=2e-6)
    valid = jnp.arange(slots)[None, :] < length
    stats = attention_stats(scores[:, None, :, 0], valid)
    for name in ("entropy", "varentropy", "divergence", "interaction"):
        np.testing.assert_allclose(getattr(stats, name)[0], getattr(want, name), rtol=2e-5)
