"""The truncation rules against float64 oracles that follow the papers' formulas, and sort."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import stats

from entropix_jax.sampler.filters import truncate
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.mechanisms.rules import learn_surprise
from entropix_jax.sampler.prefix import HEAD
from entropix_jax.sampler.settings import Parts, SamplerSettings
from entropix_jax.sampler.state import DrawnToken, Proposal
from tests.support.draw_oracles import (
    LAST,
    LLAMA3,
    NUMBERS,
    KeptTokens,
    below_one,
    random_logits,
    settings_of,
    softmax,
    truncated_draw,
)
from tests.support.samplers import PARTS, RULES, contexts_of, proposal_of


def drawn_by(
    rule: str, number: float, logits: Any, temperature: float = 1.0, uniform: float = 0.0
) -> tuple[int, int]:
    """Returns the number of tokens that a row keeps, and its sampled id. The row is padded with
    -inf, so that all calls use one program."""
    padded = np.full((1, 1000), -np.inf, np.float32)
    padded[0, : len(logits)] = logits
    uniforms, settings = jnp.full((1, 1), uniform, jnp.float32), settings_of(rule, number)
    drawn = truncated_draw(jnp.asarray(padded), proposal_of(temperature), uniforms, settings)
    return int(drawn.kept[0]), int(drawn.ids[0, 0])


def row_of(tree: Any, row: int) -> Any:
    return jax.tree.map(lambda x: x[row][None], tree)


def zipf(number: int, exponent: float) -> np.ndarray:
    """Returns logits that follow Zipf's law, in random order of ids."""
    ranks = np.random.default_rng(4).permutation(number) + 1
    return (-exponent * np.log(ranks)).astype(np.float32)


# Single rules on random rows


def oracle_of(rule: str, logits: np.ndarray, temperature: float, number: float) -> KeptTokens:
    """Returns the oracle of one row, with parameters in float32. For `nucleus` it is top-p."""
    given = (0, np.float32(number), 0.0) if rule == "nucleus" else (np.float32(number),)
    return KeptTokens.of(rule, logits, *map(float, (np.float32(temperature), *given)))


@pytest.mark.parametrize(("rule", "vocab"), [*((rule, 50) for rule in NUMBERS), ("eta", 200)])
def test_frequencies_of_each_rule(rule: str, vocab: int) -> None:
    """100,000 draws follow p renormalised over the rule's tokens, in the head and beyond it."""
    rng, rows, number = np.random.default_rng(8), 250, NUMBERS[rule][len(NUMBERS[rule]) // 2]
    logits = np.full(256, -np.inf, np.float32)
    logits[:vocab] = rng.normal(size=vocab)
    oracle = oracle_of(rule, logits, 0.8, number)
    draws = truncated_draw(
        jnp.asarray(np.tile(logits, (rows, 1))),
        proposal_of([0.8] * rows),
        jnp.asarray(below_one(rng.random((rows, 400)))),
        settings_of([rule] * rows, number),
    ).ids
    left = oracle.left
    assert oracle.decided
    found = np.bincount(np.ravel(draws), minlength=256)
    assert found[left].sum() == draws.size
    assert (left.sum() > HEAD) == (vocab == 200)
    expected = softmax(logits[left].astype(np.float64), 0.8) * draws.size
    assert left.sum() == 1 or stats.chisquare(found[left], expected).pvalue > 1e-4


@pytest.mark.parametrize(
    ("rule", "numbers"), [("nucleus", [0.3, 0.99]), ("typical", [0.2, 0.95]), ("top_h", [0.4, 0.9])]
)
def test_temperature_first_or_last(rule: str, numbers: list[float]) -> None:
    """Truncates at the temperature or at 1, in the head and beyond it, then samples at it."""
    rng, rows = np.random.default_rng(3), 120
    logits, uniforms = random_logits(rng, rows, 1000), below_one(rng.random((rows, 4)))
    temperatures, given = rng.choice([0.5, 1.5, 4], rows), rng.choice(numbers, rows)
    last = rng.random(rows) < 0.5
    proposal = proposal_of(temperatures, top_p=given, num_candidates=4)
    settings = settings_of([rule] * rows, given)
    settings = replace(settings, base=replace(settings.base, temperature_last=jnp.asarray(last)))
    arrays = jnp.asarray(logits), proposal, jnp.asarray(uniforms), settings
    drawn = jax.device_get(truncated_draw(*arrays))
    lengths = []
    for row in range(rows):
        oracle = oracle_of(rule, logits[row], 1.0 if last[row] else temperatures[row], given[row])
        if oracle.decided:
            left = np.where(oracle.left, logits[row], -np.inf)
            kept = drawn.left[row] > -np.inf
            np.testing.assert_array_equal(kept, left > -np.inf)
            again = oracle_of("nucleus", left, temperatures[row], 1.0)
            again.check(kept, drawn.ids[row], uniforms[row].astype(np.float64))
            lengths.append((bool(last[row]), oracle.left.sum() > HEAD))
    assert len(lengths) > rows / 2
    assert len({*lengths}) == 4


WARPERS = {
    "typical": ("TypicalLogitsWarper", 0.9),
    "eta": ("EtaLogitsWarper", 2e-3),
    "epsilon": ("EpsilonLogitsWarper", 3e-3),
    "nucleus": ("TopPLogitsWarper", 0.9),
}


@pytest.mark.parametrize("rule", WARPERS)
def test_transformers_keeps_the_same_tokens(
    torch: ModuleType, transformers: ModuleType, rule: str
) -> None:
    """Top-H in transformers is another rule: a sum of terms of p's own entropy, for 100 tokens."""
    rng, rows, (name, number) = np.random.default_rng(2), 300, WARPERS[rule]
    logits = random_logits(rng, rows, 1000)
    proposal, settings = (proposal_of(top_p=[number] * rows), settings_of([rule] * rows, number))
    scores = truncated_draw(jnp.asarray(logits), proposal, jnp.zeros((rows, 1)), settings).left
    warper = getattr(transformers.generation.logits_process, name)(number)
    left = warper(None, torch.from_numpy(logits)).numpy()
    compared = [
        row
        for row in range(rows)
        if oracle_of(rule, logits[row], 1.0, number).decided and np.unique(logits[row]).size == 1000
    ]
    assert len(compared) > rows / 5
    np.testing.assert_array_equal(np.isfinite(scores)[compared], np.isfinite(left)[compared])


# Rows of different rules in one batch


def mixed_batch(rows: int, vocab: int) -> tuple[jax.Array, Proposal, jax.Array, SamplerSettings]:
    rng = np.random.default_rng(vocab)
    rules = np.array([*RULES, *NUMBERS] * rows)[:rows]
    numbers = [rng.choice(NUMBERS.get(rule, [0])) for rule in rules]
    proposal = proposal_of(
        temperature=rng.choice([0, 0.5, 1, 2], size=rows, p=[0.1, 0.2, 0.5, 0.2]),
        top_k=rng.choice([0, 3, 40, 400], size=rows),
        top_p=rng.choice([0.3127, 0.9041, 1], size=rows),
        min_p=rng.choice([0, 0, 0.02], size=rows),
        num_candidates=4,
    )
    logits = jnp.asarray(random_logits(rng, rows, vocab))
    uniforms = jnp.asarray(below_one(rng.random((rows, 4))))
    return logits, proposal, uniforms, settings_of(rules, numbers)


@pytest.mark.parametrize("rule", NUMBERS)
def test_temperatures_next_to_zero(rule: str) -> None:
    number = NUMBERS[rule][len(NUMBERS[rule]) // 2]
    for temperature in (1e-45, 1e-38, 1e-6):
        assert drawn_by(rule, number, [1.0, 3.0, 2.0], temperature, LAST)[1] == 1


def test_unused_work_is_skipped() -> None:
    """A sort of 128,256 tokens costs more than the rest of the draw, so only rules that need the
    whole order sort. Searches for greedy rows, top-k, top-p, a temperature that comes last and each
    rule are behind conditions."""
    batch = jax.eval_shape(lambda: row_of(mixed_batch(1, LLAMA3), 0))
    parts = replace(PARTS, used=PARTS.used - {"top_h", "ees", "min_k"})
    program = truncated_draw.lower(*batch, parts=parts).compile().as_text()
    assert program is not None
    assert " sort(" not in program
    logits, proposal, _, settings = mixed_batch(2, 1000)
    for used, conditions in ((frozenset({"eta", "typical"}), 5), (frozenset(), 3)):
        rows = replace(contexts_of(proposal, settings, logits), parts=Parts(MECHANISMS, used))
        jaxpr = jax.make_jaxpr(jax.vmap(lambda *row: truncate(*row)[0]))(logits, rows)
        names = [equation.primitive.name for equation in jaxpr.eqns]
        assert not {"exp", "top_k", "sort", "cumsum"} & {*names}
        assert names.count("cond") == conditions


# Single rules, calculated by hand


TWO_LEVELS = np.tile([0.0, -2.0], 100)  # sigma is 1
FIVE = np.log([0.5, 0.3, 0.1, 0.06, 0.04])  # H is 1.2405 nats
EVEN = np.zeros(1000)
FORTY = float(np.log2(40 * np.log(1000)))  # on Zipf's law at s = 1 mirostat's k is 2^mu / ln N


@pytest.mark.parametrize(
    ("rule", "number", "logits", "kept"),
    [
        ("top_n_sigma", 2.0, TWO_LEVELS, 200),
        ("top_n_sigma", 2.01, np.float32(1e-22) * TWO_LEVELS, 200),  # squares underflow in float32
        ("eta", 0.25, FIVE, 2),  # sqrt(0.25) * exp(-H) is 0.1446
        ("eta", 1.0, EVEN, 1000),  # exactly exp(-H)
        ("epsilon", 0.05, FIVE, 4),
        ("top_a", 0.21, FIVE, 4),  # 0.21 * 0.5^2 is 0.0525
        ("p_less", 0, FIVE, 1),  # the sum of p^2 is 0.3552
        ("p_less", 1, FIVE, 2),  # and (5 * 0.3552 - 1) / 4 is 0.194
        ("p_less", 0, EVEN, 1000),
        ("top_h", 0.5, FIVE, 1),  # the entropy of 5/8 and 3/8 is 0.6616, 0.533 of H
        ("top_h", 0.54, FIVE, 2),
        ("top_h", 0.4, EVEN, 15),  # 1000^0.4 is 15.8
        ("ees", 0, FIVE, 2),  # 0.6616 is above 0.8 ln 2, and 0.9369 below 0.9 ln 3
        ("min_k", 0, FIVE, 2),  # ln(5 / 3) is below ln(3) / 2
        ("min_k", 10, FIVE, 3),  # 10 / ln 12.5 is 3.96
        ("mirostat", FORTY, zipf(1000, 1.0), 40),
        ("mirostat", np.log2(4 * 2 / 3), zipf(3, 2.0), 2),  # (2^mu / (1 - 1/3))^(1/2)
        ("mirostat", 10.0, EVEN, 1000),
    ],
)
def test_kept_sets_by_hand(rule: str, number: float, logits: np.ndarray, kept: int) -> None:
    assert drawn_by(rule, number, logits)[0] == kept


# Mirostat's feedback


@pytest.mark.parametrize(("target", "exponent"), [(2.0, 1.5), (3.0, 1.3), (5.0, 0.9)])
def test_a_run_of_mirostat(target: float, exponent: float) -> None:
    """Each step's mu follows from the formula, and the mean surprise reaches the target."""
    steps, rate = 1500, 0.1
    logits = zipf(2000, exponent)
    uniforms = below_one(np.random.default_rng(7).random(steps))
    settings, proposal = settings_of("mirostat", 0), proposal_of()
    own = replace(settings.own["mirostat"], rate=jnp.asarray([rate]))
    aims = replace(own, target=jnp.asarray([target]))
    row = jnp.asarray(logits)[None]
    contexts = contexts_of(proposal, settings, row)

    def step(mu: jax.Array, uniform: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        # The draw uses `mu`, and the update uses the target.
        here = {**settings.own, "mirostat": replace(own, target=mu / 2)}
        drawn = truncated_draw(row, proposal, uniform[None, None], replace(settings, own=here))
        given = replace(settings, own={**settings.own, "mirostat": aims})
        token = DrawnToken(logits=row, token=drawn.ids[:, 0])
        tally = replace(contexts.tally, states={"mirostat": mu - 2 * target})
        before = replace(contexts, settings=given, tally=tally)
        return jax.vmap(learn_surprise)(token, before) + 2 * target, (mu[0], drawn.ids[0, 0])

    start = jnp.asarray([2 * target], jnp.float32)  # initial mu
    mus, tokens = jax.jit(lambda: lax.scan(step, start, jnp.asarray(uniforms))[1])()
    surprises = -np.log2(softmax(logits.astype(np.float64), 1.0)[tokens])
    np.testing.assert_allclose(mus[1:], (mus - rate * (surprises - target))[:-1], atol=1e-5)
    assert abs(np.mean(surprises) - target) < 0.03
