"""Transforms of the logits against float64 oracles, in single rows, over a run and in mixed
batches, also with biases."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.decode import decode
from entropix_jax.names import REGIMES
from entropix_jax.sampler.context import Context
from entropix_jax.sampler.draw import row_key
from entropix_jax.sampler.filters import penalise, truncate
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.mechanisms.repetition import MAX_MATCH
from entropix_jax.sampler.mechanisms.reweigh import count_excess
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import MAX_BIASES, Parts, SamplerSettings
from entropix_jax.sampler.state import DrawnToken
from tests.support import transform_oracles as oracles
from tests.support.draw_oracles import random_logits
from tests.support.samplers import (
    ARMS,
    LITERAL,
    PLAIN,
    RULES,
    Job,
    Line,
    attn_stats,
    batch_of,
    context,
    fresh_state,
    generate,
    params_of,
    proposal_of,
    tiny_model,
    tokens_of,
    used_of,
    with_state,
)
from tests.support.steps import choose_jit, logits_for, rows_of

ROWS, VOCAB, CAPACITY = 2000, 24, 100
MODEL = tiny_model()


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
    trail = replace(rows.trail, again=jnp.ones(len(histories), bool))
    entries = replace(trail.entries, attempts=jnp.full_like(trail.entries.attempts, attempt))
    trail = replace(trail, entries=entries)
    return replace(rows, trail=trail, **fields)


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


# Each against its oracle


def test_repetition() -> None:
    rng = np.random.default_rng(1)
    logits, tokens = random_logits(rng, ROWS, VOCAB), texts(rng, ROWS)
    generated = np.array([rng.integers(0, len(text) + 1) for text in tokens])
    values = rng.choice([0.5, 1.0, 1.3], ROWS), *rng.uniform(-2, 2, (2, ROWS))
    settings = settings_of(
        "repetition", ROWS, **dict(zip(("penalty", "frequency", "presence"), values, strict=True))
    )
    views = views_of(tokens, generated=jnp.asarray(generated, jnp.int32))
    got = transformed(jnp.asarray(logits), settings, views)
    rows = zip(logits, tokens, generated, *values, strict=True)
    want = [oracles.repetition(*row) for row in rows]
    check(got, want, share_changed(logits, want))


def test_no_repeat_ngram() -> None:
    """At least one token is kept in any case."""
    rng = np.random.default_rng(2)
    logits, tokens = random_logits(rng, ROWS, VOCAB), texts(rng, ROWS)
    sizes = rng.choice([1, 2, 3, 5, MAX_MATCH], ROWS)
    settings = settings_of("no_repeat_ngram", ROWS, size=sizes)
    got = transformed(jnp.asarray(logits), settings, views_of(tokens))
    rows = zip(logits, tokens, sizes, strict=True)
    want = [oracles.no_repeat_ngram(*row) for row in rows]
    check(got, want, share_changed(logits, want))
    one = np.where(np.arange(VOCAB) == 3, 0.0, -np.inf).astype(np.float32)[None]
    settings = settings_of("no_repeat_ngram", 1, size=[1])
    assert float(transformed(jnp.asarray(one), settings, views_of([[3]]))[0, 3]) == 0.0


def test_dry() -> None:
    rng = np.random.default_rng(3)
    logits, tokens = random_logits(rng, ROWS, VOCAB), texts(rng, ROWS)
    multipliers, bases = rng.uniform((0.1, 1.0), (3.0, 1.3), (ROWS, 2)).T
    lengths, windows = rng.integers(1, 5, ROWS), rng.choice([4, 40, 1_000_000], ROWS)
    breakers = [
        [rng.integers(0, 4, rng.integers(1, 4)).tolist() for _ in range(rng.integers(0, 3))]
        for _ in range(ROWS)
    ]
    padded = np.full((ROWS, 16, 8), -1)
    for row, texts_ in enumerate(breakers):
        for i, text in enumerate(texts_):
            padded[row, i, : len(text)] = text
    settings = settings_of(
        "dry",
        ROWS,
        multiplier=multipliers,
        base=bases,
        allowed_length=lengths,
        window=windows,
        breakers=padded,
    )
    got = transformed(jnp.asarray(logits), settings, views_of(tokens))
    values = multipliers.astype(np.float32), bases.astype(np.float32), lengths, windows, breakers
    rows = zip(logits, tokens, *values, strict=True)
    want = [oracles.dry(*row) for row in rows]
    check(got, want, share_changed(logits, want))


@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_xtc(probability: float) -> None:
    """A row whose uniform number is below the probability equals the oracle, and any other row does
    not change. Their counts pass a chi-squared test, independently for attempts and branches."""
    rng = np.random.default_rng(4)
    logits = random_logits(rng, ROWS, VOCAB)
    logits[:, :5] += rng.uniform(0, 8, (ROWS, 5)).astype(np.float32)
    thresholds = rng.choice([0.02, 0.1, 0.3], ROWS)
    want = np.stack([oracles.xtc(*row) for row in zip(logits, thresholds, strict=True)])
    settings = settings_of("xtc", ROWS, probability=probability, threshold=thresholds)
    keys = jnp.asarray(np.stack([row_key(0, str(row)) for row in range(ROWS)]))
    shows = np.any(want != logits, axis=1)
    actions = []
    for attempt, branch in ((0, -1), (1, -1), (0, 0), (0, 7)):
        branches = jnp.full(ROWS, branch, jnp.int32)
        views = views_of([[1]] * ROWS, attempt, key=keys, branch=branches)
        got = transformed(jnp.asarray(logits), settings, views)
        acts = np.any((np.asarray(got) > -np.inf) != (logits > -np.inf), axis=1)
        got = got + np.max(logits, axis=1, keepdims=True)  # the draw subtracts the maximum
        check(got, [*np.where(acts[:, None], want, logits)], float(np.mean(shows)))
        actions.append(acts[shows])
    number = actions[0].size
    for i, acts in enumerate(actions):
        expected = number * np.array([probability, 1 - probability])
        if probability == 1.0:
            assert np.all(acts)
            continue
        observed = np.array([np.sum(acts), np.sum(~acts)])
        assert np.sum((observed - expected) ** 2 / expected) < 10.83  # one in a thousand
        for other in actions[:i]:
            both = number * probability**2
            assert abs(np.sum(acts & other) - both) < 4 * np.sqrt(both)


@pytest.mark.parametrize(("target", "decay"), [(0.5, 0.9), (0.3, 0.99), (0.4, 0.0)])
def test_a_run_of_adaptive_p(target: float, decay: float) -> None:
    """Each step's logits equal the oracle's, and the mean probability converges to the target."""
    rng, steps = np.random.default_rng(5), 300
    settings = settings_of("adaptive_p", 1, target=target, decay=decay)
    oracle, state, seen = oracles.AdaptiveP(target, decay), fresh_state(1), []
    after = jax.jit(
        lambda row, drawn: jax.vmap(count_excess)(drawn, replace(row, settings=settings))
    )
    rows = np.full((steps, VOCAB), -np.inf, np.float32)
    rows[:, :5] = np.log(rng.dirichlet([0.5] * 5, steps)).clip(-40)
    for logits in rows:
        row = views_of([[1]], tally=state.tally)
        got = np.asarray(transformed(jnp.asarray(logits)[None], settings, row))[0]
        np.testing.assert_allclose(got, oracle.logits(logits), rtol=1e-4, atol=1e-3)
        p = np.exp(got - got.max())
        token = rng.choice(VOCAB, p=p / p.sum())
        drawn = DrawnToken(
            logits=jnp.asarray(logits)[None],
            token=jnp.asarray([token], jnp.int32),
            inputs={"adaptive_p": jnp.asarray(logits)[None]},
        )
        excess = after(row, drawn)
        state = with_state(state, "adaptive_p", excess)
        seen.append(float(np.exp(logits[token]) / np.sum(np.exp(logits))))
        oracle.drew(seen[-1])
        mean = oracle.sum / oracle.weight
        assert float(excess[0]) == pytest.approx(mean - target, abs=1e-5)
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


# In a batch

VALUES: dict[str, dict[str, Any]] = {
    "none": {},
    "xtc": {"xtc.probability": 0.7, "xtc.threshold": 0.02},
    "dry": {"dry.multiplier": 5.0, "dry.allowed_length": 1, "dry.breakers": ""},
    "adaptive_p": {"adaptive_p.target": 0.2},
    "no_repeat_ngram": {"no_repeat_ngram.size": 1},
    "repetition": {"repetition.frequency": 2.0, "repetition.presence": 1.0},
    "all": {
        "xtc.probability": 0.5,
        "dry.multiplier": 1.0,
        "adaptive_p.target": 0.4,
        "no_repeat_ngram.size": 2,
        "repetition.penalty": 1.3,
    },
}


def job(values: dict[str, Any], row: str, phrases: Iterable[Iterable[int]] = ()) -> Job:
    sampler = params_of("min-p", {**PLAIN, "base.min_p": 0.02, **values})
    banned = np.full((8, 16), -1, np.int32)
    for place, phrase in zip(banned, phrases, strict=False):
        tokens = [*phrase]
        place[: len(tokens)] = tokens
    own = replace(sampler.own["phrases"], banned=banned)
    sampler = replace(sampler, own={**sampler.own, "phrases": own})
    return Job([5, 6, 7, 5, 6], sampler, budget=24, row_id=row)


@cache
def plain_lines(row: str) -> tuple[Line, ...]:
    """Returns the lines of a row without transforms."""
    return tuple(generate(MODEL, [job({}, row)])[0])


def test_mixed_batches_equal_single_rows() -> None:
    """Mixed batches use the same programs as rows without transforms."""
    plain_lines("none")
    program: Any = decode
    compiled = program._cache_size()
    jobs = [job(values, f"{name} 1") for name, values in VALUES.items()]
    together = generate(MODEL, jobs)
    for one, lines in zip(jobs, together, strict=True):
        (alone,) = generate(MODEL, [one])
        assert [line.exact for line in lines] == [line.exact for line in alone]
    assert program._cache_size() == compiled
    # Each transform changes the text.
    for name, lines in zip(VALUES, together, strict=True):
        assert (tokens_of(lines) != tokens_of(plain_lines(f"{name} 1"))) == (name != "none")
    written = tokens_of(together[[*VALUES].index("no_repeat_ngram")])
    assert len({*written, 5, 6, 7}) == len(written) + 3


# Phrases


def holds_phrase(tokens: list[int], phrase: list[int]) -> bool:
    return any(tokens[i : i + len(phrase)] == phrase for i in range(len(tokens)))


def test_phrases_are_retracted() -> None:
    """The text is the same up to the phrase, whose first token is replaced."""
    jobs, begins, bans = [], [], []
    for number, start in enumerate((0, 2, 5, 10, 15)):
        written = tokens_of(plain_lines(str(number)))
        phrase = written[start : start + 1 + number]
        first = next(i for i in range(24) if written[i : i + len(phrase)] == phrase)
        jobs.append(job({}, str(number), [phrase]))
        begins.append(first)
        bans.append(phrase)
    for number, lines in enumerate(generate(MODEL, jobs)):
        before, after = tokens_of(plain_lines(str(number))), tokens_of(lines)
        assert after[: begins[number]] == before[: begins[number]]
        assert after[begins[number]] != before[begins[number]]
        assert not holds_phrase(after, bans[number])
        assert len(after) == 24
        # Resampled tokens have the action `phrases`, not `backspace`.
        assert {line.action for line in lines} == {"sample", "phrases"}


def test_settled_tokens_are_not_retracted() -> None:
    """Uses many phrases at once, some longer than the reach, and some rows with `backspace`."""
    rng = np.random.default_rng(6)
    jobs, bans = [], []
    for number in range(9):
        written = tokens_of(plain_lines(str(number)))
        starts = rng.integers(0, 20, 8)
        phrases = [written[s : s + int(rng.integers(1, 13))] for s in starts]
        values = {"arms.mid": "backspace", "backspace.reach": 8} if number >= 6 else {}
        jobs.append(job(values, str(number), phrases))
        bans.append(phrases)
    alone = [generate(MODEL, [one])[0] for one in jobs[::4]]
    together = generate(MODEL, jobs, chunks=(1, 2, 32, 32, 32, 32))
    for lines, again in zip(together[::4], alone, strict=True):
        assert [line.exact for line in lines] == [line.exact for line in again]
    for phrases, lines in zip(bans, together, strict=True):
        settled = 0
        for line in lines:
            assert line.position >= settled
            settled = max(settled, int(line.records[0].settled))
        assert not any(holds_phrase(tokens_of(lines), phrase) for phrase in phrases)


def test_phrases_that_are_not_retracted() -> None:
    """Phrases are kept if the budget is spent, and in forced tokens."""
    written = tokens_of(plain_lines("0"))
    spent = job({"phrases.per_row": 0}, "0", [written[3:5]])
    assert tokens_of(generate(MODEL, [spent])[0]) == written
    thought: dict[str, Any] = {f"arms.{regime}": "inject" for regime in ("mid", "loop")}
    thought |= {"inject.thought": "abcd", "inject.cooldown": 4}
    thought |= {"inject.after": "", "inject.earliest": 0}
    (lines,) = generate(MODEL, [job(thought, "0", [[97, 98], [99, 100]])])
    assert holds_phrase(tokens_of(lines), [97, 98, 99, 100])


# Biases

TEXT = (1, 2, 3, 4)
Pairs = Sequence[Sequence[float]]


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
                found = step.candidates[row, 0] if step.forks[row] else choice.token[row]
                assert int(found) == expected, case
                assert not step.forks[row] or int(step.width[row]) == 1
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


def test_a_bias_of_0_changes_nothing() -> None:
    """Biases of other rows do not change the row either."""
    values = {**PLAIN, "base.temperature": 1.5, "base.top_k": 0, "base.top_p": 1.0}

    def job(row: str, pairs: Pairs) -> Job:
        sampler = params_of(LITERAL, {**values, "draw.bias": pairs})
        return Job([5, 6, 7], sampler, budget=24, row_id=row)

    alone = generate(MODEL, [job(str(i), []) for i in range(4)])
    zeros = [[i, 0.0] for i in range(MAX_BIASES)]
    others = [[[i, bias] for i in range(MAX_BIASES)] for bias in (-50.0, 3.0, 9.0)]
    beside = generate(MODEL, [job("0", []), job("1", zeros), *(job("2", p) for p in others)])
    for lines, same in zip(alone[:2], beside, strict=False):
        assert [line.exact for line in lines] == [line.exact for line in same]
    texts = {tuple(line.token for line in lines) for lines in (alone[2], *beside[2:])}
    assert len(texts) > 2
