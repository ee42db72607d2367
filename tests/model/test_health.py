"""NaN and infinity are located where they arise, reported, and never become a token."""

from __future__ import annotations

import json
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
from entropix_jax.engine.score import score_tokens
from entropix_jax.engine.state import Recording
from entropix_jax.errors import UserError
from entropix_jax.model.attention import attend, attention_stats
from entropix_jax.model.cache import init_cache
from entropix_jax.model.finite import NOWHERE, first_unsound
from entropix_jax.model.llama import forward
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.model.params import Params
from entropix_jax.model.write import append
from tests.support import reference
from tests.support.meshes import mesh_of_two
from tests.support.model_folders import (
    config_of_folder,
    poisoned,
    sharp_params,
    token_ids,
    write_model,
)
from tests.support.models import load_params
from tests.support.runs import Spec, calibrated, requests, run_rows, run_specs
from tests.support.samplers import LITERAL

CHECK = Recording(check=True)
SHAPE = config_of_folder()
NUMBERS = (jnp.nan, jnp.inf, -jnp.inf)
PROMPT = [token_ids()["<|begin_of_text|>"], 40, 41, 42, 43, 44]
AT = 3  # index of the bad token in the prompt


def overflowing(layer: int, name: str) -> Callable[[Params], Params]:
    """Returns a change of weights after which only one token has a nonzero first channel, in every
    layer, and only this token overflows in one layer's matrix."""

    def change(params: Params) -> Params:
        embedding = params.embedding.at[:, 0].set(0.0)
        embedding = embedding.at[PROMPT[AT]].set(0.0).at[PROMPT[AT], 0].set(1000.0)
        layers = [
            replace(one, output=one.output.at[0].set(0.0), down=one.down.at[0].set(0.0))
            for one in params.layers
        ]
        huge = getattr(layers[layer], name).at[:, 0].set(3e38)
        layers[layer] = replace(layers[layer], **{name: huge})
        return replace(params, embedding=embedding, layers=tuple(layers))

    return change


def run_of(model: LanguageModel, prompt: list[int], recording: Recording) -> Any:
    requests = [Spec(prompt, "0", 20), Spec([*PROMPT[:AT], 50], "1", 20)]
    return run_specs(model, requests, LITERAL, ignore_eos=True, recording=recording).run()


@pytest.mark.parametrize(("layer", "name"), [(0, "query"), (1, "key"), (0, "value"), (1, "gate")])
def test_overflow_in_the_prompt_is_located(tmp_path: Path, layer: int, name: str) -> None:
    model = load(str(write_model(tmp_path / "model", overflowing(layer, name))))
    bad, good = run_of(model, PROMPT, CHECK)
    where = "" if name == "gate" else "the queries, keys or values of "
    assert bad.error == f"NaN or infinity in {where}layer {layer} at position {AT}"
    assert bad.finish_reason == "error"
    assert bad.tokens == []
    assert good.finish_reason == "length"


@pytest.mark.parametrize(("number", "at"), [*zip(NUMBERS, [0, AT, len(PROMPT) - 1], strict=True)])
def test_non_finite_embedding_is_located(tmp_path: Path, number: float, at: int) -> None:
    """Tests the first token, a middle one, and the last one, which the first step reads."""

    def change(params: Params) -> Params:
        return replace(params, embedding=params.embedding.at[PROMPT[at], 5].set(number))

    model = load(str(write_model(tmp_path / "model", change)))
    told = f"NaN or infinity in the embedding at position {at}"
    for prompt in (PROMPT, PROMPT * 8):  # in one call, and in several
        bad, _ = run_of(model, prompt, CHECK)
        assert (bad.error, bad.tokens) == (told, [])
        if at < len(prompt) - 1:  # scoring does not read a text's last token
            with pytest.raises(UserError, match=f"^{told}$"):
                list(score_tokens(model, prompt, calibrated(model), recording=CHECK))


def test_non_finite_generated_token_is_located(tmp_path: Path) -> None:
    """The row keeps the tokens before it. A separate run finds the token to poison."""
    sound = load(str(write_model(tmp_path / "sound")))
    (whole, _) = run_of(sound, PROMPT, CHECK)
    assert whole.finish_reason == "length"
    unchecked, _ = run_of(sound, PROMPT, Recording())
    ids = [t.token_id for t in whole.tokens]
    assert ids == [t.token_id for t in unchecked.tokens]
    branched = {f for t in whole.tokens for one in t.branches or () for f in one.tokens}
    at = next(i for i, t in enumerate(ids) if t not in PROMPT + ids[:i] and t not in branched)
    bad = load(str(write_model(tmp_path / "bad", poisoned(ids[at]))))
    (row, _) = run_of(bad, PROMPT, CHECK)
    assert [t.token_id for t in row.tokens] == ids[: at + 1]
    position = len(PROMPT) + at
    assert row.error == f"NaN or infinity in the embedding at position {position}"


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


@pytest.mark.slow
@pytest.mark.parametrize("slots", [2, 4])  # one or two for each device
def test_a_failed_row_does_not_affect_the_next_one(tmp_path: Path, slots: int) -> None:
    """The failed row may be in any slot, with or without a shared prompt, on two devices."""
    folder = write_model(tmp_path / "model", poisoned(PROMPT[AT]))
    tokenizer = load(str(folder)).tokenizer
    bad, good = (tokenizer.decode(ids[1:]) for ids in (PROMPT, [*PROMPT[:AT], 50, 51]))
    prompts = (bad, bad, good, bad, good, good)
    lines = [json.dumps({"prompt": prompt, "id": str(i)}) for i, prompt in enumerate(prompts)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    output = tmp_path / "out.jsonl"
    arguments = ["--input", str(tmp_path / "in.jsonl"), "--output", str(output), "--no-chat"]
    arguments += ["--model", str(folder), "--context", "64", "--slots", str(slots)]
    arguments += ["--max-new-tokens", "8", "--sampler", "greedy"]
    assert main(["batch", *arguments]) == 0
    unchecked = {one["id"]: one for one in map(json.loads, output.read_text().splitlines())}
    output.unlink()
    Path(f"{output}.run.json").unlink()
    # `--check` would refuse the poisoned weights before the run.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("entropix_jax.model.checkpoint._is_finite", lambda weight: True)
        assert main(["batch", *arguments, "--check"]) == 0
    for one in map(json.loads, output.read_text().splitlines()):
        if prompts[int(one["id"])] == bad:
            assert one["error"] == f"NaN or infinity in the embedding at position {AT}"
            assert "NaN or infinite logits" in unchecked[one["id"]]["error"]
        else:
            assert one["token_ids"] == unchecked[one["id"]]["token_ids"] != []


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2", "model=2"])
def test_non_finite_embedding_on_two_devices(tmp_path: Path, mesh: str) -> None:
    folder = write_model(tmp_path / "model", poisoned(PROMPT[AT]))
    for prompt in (PROMPT, PROMPT[: AT + 1]):  # found by the prefill, and by the first step
        bad, good = run_of(load(str(folder), mesh=mesh_of_two(mesh)), prompt, CHECK)
        assert bad.error == f"NaN or infinity in the embedding at position {AT}"
        assert good.finish_reason == "length"


def test_non_finite_branch_is_never_best(tmp_path: Path) -> None:
    """The other branches have the same scores as in a sound model."""
    (whole, _) = run_of(load(str(write_model(tmp_path / "sound"))), PROMPT, CHECK)
    forks = [one.branches for one in whole.tokens if one.branches]
    taken = {*PROMPT, *(one.token_id for one in whole.tokens)}
    lost = {t for fork in forks for one in fork if not one.chosen for t in one.tokens} - taken
    bad = load(str(write_model(tmp_path / "bad", poisoned(min(lost)))))
    (row, _) = run_of(bad, PROMPT, CHECK)
    assert [one.token_id for one in row.tokens] == [one.token_id for one in whole.tokens]
    for fork, sound in zip((t.branches for t in row.tokens if t.branches), forks, strict=True):
        for one, other in zip(fork, sound, strict=True):
            at = other.tokens.index(min(lost)) + 1 if min(lost) in other.tokens else None
            assert one == (other if at is None else replace(one, tokens=other.tokens[:at]))
            assert (one.score is None) == (at is not None)


def in_one_slot(model: LanguageModel, recording: Recording, *specs: Spec) -> list[Row]:
    """Runs rows in the same slot, one after another."""
    engine = Engine(model, slots=1, capacity=256, recording=recording)
    return run_rows(engine, requests(model, specs, ignore_eos=True))


@pytest.mark.parametrize("recording", [CHECK, Recording()], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    "change", [overflowing(0, "value"), poisoned(PROMPT[AT])], ids=["overflow", "poison"]
)
def test_non_finite_values_fail_one_row(
    tmp_path: Path, change: Callable[[Params], Params], recording: Recording
) -> None:
    """The next row in its slot equals the row alone, bit for bit."""
    model = load(str(write_model(tmp_path / "model", change)))
    sound = Spec([*PROMPT[:AT], 51], "1", 30)
    bad, good = in_one_slot(model, recording, Spec(PROMPT * 8, "0", 30), sound)
    place = f" at position {AT}" if recording.check else f"logits at position {8 * len(PROMPT)}"
    assert bad.error is not None
    assert bad.error.endswith(place)
    assert bad.tokens == []
    (alone,) = in_one_slot(model, recording, sound)
    assert len(good.tokens) == 30
    assert good.tokens == alone.tokens


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
    hidden, stats, grown = forward(
        poisoned(7)(params), SHAPE, tokens, count, cache, window=16, check=True
    )
    np.testing.assert_array_equal(hidden[0, :2], want[0, :2])
    assert np.isnan(hidden[0, 2:]).all()
    assert stats.sound is not None
    assert stats.sound.all(axis=-1).tolist() == [[True, True, False, False, False]]
    assert all(np.isfinite(x).all() for x in grown.values)
    assert all(np.isnan(x[:, :, 2]).all() for x in grown.keys)


def test_padding_is_not_checked() -> None:
    """Rows without tokens in a call are not checked either."""
    params = sharp_params()
    bad = replace(params, embedding=params.embedding.at[0].set(jnp.nan))
    tokens = jnp.array([[5, 0, 0], [0, 0, 0], [5, 6, 0]], jnp.int32)
    cache = init_cache(SHAPE, 3, 16, jnp.dtype(jnp.float32))
    for more, found in ((0, [[NOWHERE, NOWHERE]] * 3), (1, [[1, 0], [0, 0], [2, 0]])):
        count = jnp.array([1, 0, 2], jnp.int32) + more
        _, stats, _ = forward(bad, SHAPE, tokens, count, cache, window=16, check=True)
        assert stats.sound is not None
        assert stats.sound.shape == (3, 3, 1 + 2 * SHAPE.num_layers)
        assert first_unsound(stats.sound, cache.length).tolist() == found


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
