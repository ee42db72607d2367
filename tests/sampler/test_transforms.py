"""Transforms of the logits against float64 oracles, in single rows, over a run and in mixed
batches, also with biases."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.names import REGIMES
from entropix_jax.replay import formulas
from entropix_jax.replay.threefry import row_key as replay_key
from entropix_jax.sampler.context import Context
from entropix_jax.sampler.draw import row_key
from entropix_jax.sampler.filters import penalise, truncate
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.mechanisms.repetition import MAX_MATCH
from entropix_jax.sampler.mechanisms.reweigh import count_excess
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import Parts, SamplerSettings
from entropix_jax.sampler.state import DrawnToken
from tests.support.draw_oracles import place_of, random_logits
from tests.support.samplers import (
    ARMS,
    LITERAL,
    RULES,
    attn_stats,
    batch_of,
    context,
    fresh_state,
    params_of,
    proposal_of,
    used_of,
    with_state,
)
from tests.support.steps import choose_jit, logits_for, rows_of

ROWS, VOCAB, CAPACITY = 2000, 24, 100


# Rows


def texts(rng: np.random.Generator, rows: int) -> list[list[int]]:
    """Returns texts with few distinct tokens, half of them periodic."""
    lengths = rng.choice([1, 2, 5, 30, CAPACITY], size=rows)
    made = []
    for length, kinds in zip(lengths, rng.choice([1, 2, 4, 20], size=rows), strict=True):
        text = rng.integers(0, kinds, length)
        period = rng.integers(1, length + 1) if rng.random() < 0.5 else length
        made.append(np.resize(text[:period], length).tolist())
    return made


TRANSFORMS = Parts(MECHANISMS, frozenset(m.name for m in MECHANISMS if m.logits or m.reweigh))


def views_of(histories: Iterable[list[int]], attempt: int = 0, **fields: Any) -> Context:
    """Returns rows with these tokens, junk after them, and `attempt` retractions at the end."""
    histories = list(histories)
    padded = np.full((len(histories), CAPACITY), 1, np.int32)
    for row, tokens in zip(padded, histories, strict=True):
        row[: len(tokens)] = tokens
    one = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(histories), *jnp.shape(x))), context())
    one = replace(one, parts=TRANSFORMS)
    lengths = jnp.asarray([*map(len, histories)], jnp.int32)
    rows: Context = replace(one, history=jnp.asarray(padded), length=lengths, generated=lengths)
    return replace(rows, attempt=jnp.full_like(lengths, attempt), **fields)


def settings_of(name: str, rows: int, **fields: Any) -> SamplerSettings:
    """Returns settings of rows with these values in a mechanism's section."""
    base = params_of("min-p")
    settings = jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *jnp.shape(x))), base)
    own = settings.own[name]
    given = {
        key: jnp.broadcast_to(jnp.asarray(value, old.dtype), old.shape)
        for key, value in fields.items()
        for old in [getattr(own, key)]
    }
    changed = replace(own, **given)
    return replace(settings, own={**settings.own, name: changed})


@jax.jit
def transformed(logits: jax.Array, settings: SamplerSettings, rows: Context) -> jax.Array:
    """Returns the logits after penalties and truncation, minus the highest, at temperature 1."""
    proposal = proposal_of(temperature=np.ones(logits.shape[0]))
    rows = replace(rows, settings=settings, proposal=proposal, log_probs=logits)
    return jax.vmap(lambda logits, ctx: truncate(penalise(logits, ctx), ctx)[0])(logits, rows)


def check(got: jax.Array, want: Any, changes: float) -> None:
    """Compares each row up to rounding and a constant."""
    found, wanted = (x - np.max(x, axis=-1, keepdims=True) for x in map(np.asarray, (got, want)))
    np.testing.assert_array_equal(found > -np.inf, wanted > -np.inf)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-4)
    assert changes > 0.2, "the rows show too little"


def share_changed(logits: np.ndarray, want: list[np.ndarray]) -> float:
    return float(np.mean([np.any(a != b) for a, b in zip(logits, want, strict=True)]))


# Each against the formulas of a replay


def check_rows(name: str, logits: np.ndarray, tokens: Sequence[list[int]], **columns: Any) -> None:
    """Compares a filter with its formula, for rows with these values in its section."""
    generated = columns.pop("generated", [len(text) for text in tokens])
    padded = columns.pop("padded", {})
    settings = settings_of(name, len(tokens), **{**columns, **padded})
    views = views_of(tokens, generated=jnp.asarray(generated, jnp.int32))
    got = transformed(jnp.asarray(logits), settings, views)
    want = []
    for row, text in enumerate(tokens):
        v = {
            f"{name}.{key}": np.asarray(column[row]).tolist()
            for key, column in columns.items()
            if key != "breakers"
        }
        breakers = columns["breakers"][row] if "breakers" in columns else ()
        place = place_of(v, text, generated=generated[row], breakers=breakers)
        z = logits[row].astype(np.float64)
        want.append(formulas.kept(getattr(formulas, name)(z, place), z))
    check(got, want, share_changed(logits, want))


def test_repetition() -> None:
    rng = np.random.default_rng(1)
    logits, tokens = random_logits(rng, ROWS, VOCAB), texts(rng, ROWS)
    generated = [int(rng.integers(0, len(text) + 1)) for text in tokens]
    frequency, presence = rng.uniform(-2, 2, (2, ROWS))
    values = {"penalty": rng.choice([0.5, 1.0, 1.3], ROWS), "frequency": frequency}
    check_rows("repetition", logits, tokens, **values, presence=presence, generated=generated)


def test_no_repeat_ngram() -> None:
    """At least one token is kept in any case."""
    rng = np.random.default_rng(2)
    logits, tokens = random_logits(rng, ROWS, VOCAB), texts(rng, ROWS)
    check_rows("no_repeat_ngram", logits, tokens, size=rng.choice([1, 2, 3, 5, MAX_MATCH], ROWS))
    one = np.where(np.arange(VOCAB) == 3, 0.0, -np.inf).astype(np.float32)[None]
    settings = settings_of("no_repeat_ngram", 1, size=[1])
    assert float(transformed(jnp.asarray(one), settings, views_of([[3]]))[0, 3]) == 0.0


def test_dry() -> None:
    rng = np.random.default_rng(3)
    logits, tokens = random_logits(rng, ROWS, VOCAB), texts(rng, ROWS)
    breakers = [
        [rng.integers(0, 4, rng.integers(1, 4)).tolist() for _ in range(rng.integers(0, 3))]
        for _ in range(ROWS)
    ]
    padded = np.full((ROWS, 16, 8), -1)
    for row, texts_ in enumerate(breakers):
        for i, text in enumerate(texts_):
            padded[row, i, : len(text)] = text
    check_rows(
        "dry",
        logits,
        tokens,
        multiplier=rng.uniform(0.1, 3.0, ROWS).astype(np.float32),
        base=rng.uniform(1.0, 1.3, ROWS).astype(np.float32),
        allowed_length=rng.integers(1, 5, ROWS),
        window=rng.choice([4, 40, 1_000_000], ROWS),
        breakers=breakers,
        padded={"breakers": padded},
    )


@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_xtc(probability: float) -> None:
    """Each attempt at a position, and each branch, has its own random number."""
    rng = np.random.default_rng(4)
    logits = random_logits(rng, ROWS, VOCAB)
    logits[:, :5] += rng.uniform(0, 8, (ROWS, 5)).astype(np.float32)
    thresholds = rng.choice([0.02, 0.1, 0.3], ROWS)
    settings = settings_of("xtc", ROWS, probability=probability, threshold=thresholds)
    keys = [row_key(0, str(row)) for row in range(ROWS)]
    changed = []
    for attempt, branch in ((0, -1), (1, -1), (0, 0), (0, 7)):
        branches = jnp.full(ROWS, branch, jnp.int32)
        views = views_of([[1]] * ROWS, attempt, key=jnp.asarray(np.stack(keys)), branch=branches)
        got = transformed(jnp.asarray(logits), settings, views)
        want = []
        for row, threshold in enumerate(thresholds):
            v = {"xtc.probability": probability, "xtc.threshold": threshold}
            key = replay_key(0, str(row))
            place = place_of(v, key=key, bans=[0] * attempt, branch=branch)
            want.append(formulas.xtc(logits[row].astype(np.float64), place, 0.0))
        check(got, want, share_changed(logits, want) / probability)
        changed.append([np.any(a != b) for a, b in zip(logits, want, strict=True)])
    assert probability == 1.0 or len({*map(tuple, changed)}) == 4
    half = jnp.full((ROWS, VOCAB), -jnp.inf).at[:, :2].set(0.0)  # both have the threshold's mass
    settings = settings_of("xtc", ROWS, probability=1.0, threshold=0.5)
    kept = transformed(half, settings, views_of([[1]] * ROWS))
    assert np.argmax(kept, axis=1).tolist() == [1] * ROWS


@pytest.mark.parametrize(("target", "decay"), [(0.5, 0.9), (0.3, 0.99), (0.4, 0.0)])
def test_a_run_of_adaptive_p(target: float, decay: float) -> None:
    """Each step's logits equal the formula's, and the mean probability converges to the target."""
    rng, steps = np.random.default_rng(5), 300
    settings = settings_of("adaptive_p", 1, target=target, decay=decay)
    v = {"adaptive_p.target": target, "adaptive_p.decay": decay, "truncation.rule": "nucleus"}
    state, states, seen = fresh_state(1), {"adaptive_p": 0.0}, []
    after = jax.jit(
        lambda row, drawn: jax.vmap(count_excess)(drawn, replace(row, settings=settings))
    )
    rows = np.full((steps, VOCAB), -np.inf, np.float32)
    rows[:, :5] = np.log(rng.dirichlet([0.5] * 5, steps)).clip(-40)
    for logits in rows:
        row = views_of([[1]], tally=state.tally)
        got = np.asarray(transformed(jnp.asarray(logits)[None], settings, row))[0]
        exact = logits.astype(np.float64)
        want = formulas.kept(formulas.adaptive_p(exact, place_of(v, states=states), 0.0), exact)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
        p = np.exp(got - got.max())
        token = int(rng.choice(VOCAB, p=p / p.sum()))
        drawn = DrawnToken(
            logits=jnp.asarray(logits)[None],
            token=jnp.asarray([token], jnp.int32),
            inputs={"adaptive_p": jnp.asarray(logits)[None]},
        )
        excess = after(row, drawn)
        state = with_state(state, "adaptive_p", excess)
        seen.append(float(np.exp(formulas.log_softmax(exact))[token]))
        states = formulas.learn(
            v, states, formulas.Proposal("", 1.0, (0,), 1, 0), exact, exact, token
        )
        assert float(excess[0]) == pytest.approx(states["adaptive_p"], abs=1e-5)
    assert np.mean(seen) == pytest.approx(target, abs=0.05)


def test_a_transform_cannot_restore_or_remove_all_tokens() -> None:
    logits = jnp.asarray([[-jnp.inf, 1.0, 2.0, 3.0]])
    for changed in (jnp.full(4, 7.0), jnp.full(4, -jnp.inf)):
        for kind in ("logits", "reweigh"):
            own: Any = replace(MECHANISMS[-2], name="own", active=None, settings=None, init=None)
            own = replace(own, logits=None, reweigh=None, learn=None)
            own = replace(own, **{kind: lambda *_, changed=changed: changed})
            parts = Parts((*MECHANISMS, own), frozenset({"own"}))
            got = transformed(logits, settings_of("dry", 1), views_of([[1]], parts=parts))
            stays = bool(jnp.all(changed == -jnp.inf))
            want = logits if stays else jnp.asarray([[-jnp.inf, 7.0, 7.0, 7.0]])
            check(got, want, changes=1.0)


def test_the_lowest_temperature_with_a_transform() -> None:
    """Logits divided by it would overflow, unlike their differences from the highest logit."""
    logits = jnp.asarray([[1.0, 8.0, 9.0, -jnp.inf]])
    settings, views = settings_of("xtc", 1, probability=1e-9), views_of([[1]])
    for last in (False, True):
        base = replace(settings.base, temperature_last=jnp.asarray([last]))
        proposal = proposal_of(temperature=[1.3e-38])
        ctx = replace(views, proposal=proposal, settings=replace(settings, base=base))
        ctx = replace(ctx, log_probs=jax.nn.log_softmax(logits))
        found, _ = jax.vmap(truncate)(logits, ctx)
        assert np.argmax(found) == 2
        assert not np.isnan(np.asarray(found)).any()


# Compiled programs


def test_only_used_transforms_are_compiled() -> None:
    for preset, used in (
        ("min-p", set()),
        (LITERAL, set()),
        ("entropix", {"dry"}),
        ("xtc", {"xtc"}),
        ("dry", {"dry"}),
        ("adaptive-p", {"adaptive_p"}),
    ):
        own = used_of(load_sampler(preset))
        assert own - {*ARMS} == used
        rows = views_of([[1]], parts=Parts(MECHANISMS, own))
        settings = batch_of(params_of(preset))
        jaxpr = str(jax.make_jaxpr(transformed)(jnp.zeros((1, VOCAB)), settings, rows))
        # A choice by platform is made in lowering, and is not a branch of the program.
        # The other four: noise floor, temperature 0, top-k and top-p, temperature last.
        assert jaxpr.count(" cond[") - jaxpr.count("platform_index") == len(used) + 4
    phrases = load_sampler("min-p").with_values({"phrases.banned": ["ab", ""]})
    assert used_of(phrases) == {"phrases", "sample", "resample"}


# Biases

TEXT = (1, 2, 3, 4)


def modified(logits: Any, floored: Any, **values: Any) -> list[float]:
    """Returns the penalised logits of one row, whose history is token 0."""
    values = {"metrics.noise_floor": True, **{k.replace("__", "."): v for k, v in values.items()}}
    z, log_probs = (jnp.asarray(x, jnp.float32) for x in (logits, floored))
    ctx = context(settings=params_of("min-p", values), log_probs=log_probs)
    return np.asarray(penalise(z, ctx)).tolist()


def test_every_arm_and_rule_samples_a_token_raised_by_100() -> None:
    """Argmax, and tokens below the noise floor, follow the bias, too. Metrics and regimes do not
    change."""
    token = 40
    cases = [(arm, rule) for arm in ARMS for rule in RULES]
    others = {"loop.max_period": 0, "inject.thought": ""}
    changes = [
        {**{f"arms.{name}": arm for name in REGIMES}, "truncation.rule": rule, **others}
        for arm, rule in cases
    ]
    logits = jnp.asarray(np.tile(logits_for("lelv"), (len(cases), 1)))
    rows, state = rows_of(*[TEXT] * len(cases)), fresh_state(len(cases))
    seen = []
    for floor in (False, True):
        for bias in ([], [[token, 100.0]]):
            own = {"draw.bias": bias, "metrics.noise_floor": floor}
            settings = batch_of(*(params_of(LITERAL, {**c, **own}) for c in changes))
            choice, step, _ = choose_jit(logits, attn_stats(len(cases)), settings, state, rows)
            expected = token if bias else 9
            for row, case in enumerate(cases):
                width = int(step.width[row])
                found = step.candidates[row, :width] if step.forks[row] else choice.token[row]
                assert {*np.ravel(found).tolist()} == {expected}, case
            seen.append(jax.tree.leaves(choice.observation))
    for without, raised in (seen[:2], seen[2:]):
        for one, other in zip(without, raised, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_bias_with_bans_penalties_and_the_noise_floor() -> None:
    """A ban overrides it, and penalties apply after it. The noise floor uses the model's logits. A
    raised token is kept, and a lowered one stays above or below the floor."""
    found = modified([1, 2, 3], [0, 0, 0], draw__bans=[1], draw__bias=[[1, 100], [2, -100]])
    assert found == [1, -np.inf, -97]
    found = modified([1, 2], [0, 0], draw__bias=[[0, 2.0]], repetition__penalty=1.5)
    assert found == [2, 2]
    low = -np.inf
    logits, floored = [4, 3, -9, -9, -9], [0, 0, low, low, low]
    for bias, expected in (
        ([], [4, 3, low, low, low]),
        ([[2, 100]], [4, 3, 91, low, low]),
        ([[2, 0.5], [3, 0]], [4, 3, -8.5, low, low]),
        ([[0, -100], [1, 2], [4, -1]], [-96, 5, low, low, low]),
    ):
        assert modified(logits, floored, draw__bias=bias) == expected
    # A small bias does not make its token the only one if all tokens above the floor are banned.
    found = modified(logits, floored, draw__bias=[[2, 0.5], [1, 9]], draw__bans=[0, 1])
    assert found == [low, low, -8.5, -9, -9]
