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

from entropix_jax.sampler import prefix
from entropix_jax.sampler.context import Proposal
from entropix_jax.sampler.filters import truncate
from entropix_jax.sampler.mechanisms.mirostat import MirostatState, learn
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import DrawnToken
from tests.support.draw_oracles import (
    LAST,
    LLAMA3,
    NUMBERS,
    Drawn,
    Kept,
    below_one,
    draw_rows,
    mirostat,
    random_logits,
    settings_of,
    softmax,
    truncated_draw,
)
from tests.support.samplers import RULES, contexts_of, proposal_of


def one_row(
    rule: str, number: float, logits: Any, uniforms: Any = (0.0,), temperature: float = 1.0
) -> Drawn:
    """What one row keeps and draws. Impossible tokens fill it up: few shapes, few programs."""
    shape = (256 if len(logits) <= 256 else 5000, 8 if len(uniforms) <= 8 else len(uniforms))
    padded, numbers = np.full(shape[0], -np.inf), np.zeros(shape[1])
    padded[: len(logits)], numbers[: len(uniforms)] = logits, uniforms
    drawn = truncated_draw(
        jnp.asarray(padded, jnp.float32)[None],
        proposal_of(temperature, rule=rule, draws=len(uniforms)),
        jnp.asarray(numbers, jnp.float32)[None],
        settings_of(rule, number),
    )
    return replace(drawn, ids=drawn.ids[0, : len(uniforms)])


def kept_of(rule: str, number: float, logits: Any, temperature: float = 1.0) -> int:
    """How many tokens one row keeps."""
    return int(one_row(rule, number, logits, temperature=temperature).kept[0])


def drawn_by(
    rule: str, number: float, logits: Any, uniforms: Any, temperature: float = 1.0
) -> list[int]:
    """What one row draws at each uniform number."""
    return one_row(rule, number, logits, uniforms, temperature).ids.tolist()


def row_of(tree: Any, row: int) -> Any:
    return jax.tree.map(lambda x: x[row][None], tree)


def zipf(number: int, exponent: float) -> np.ndarray:
    """Logits that follow Zipf's law, in no order of ids."""
    ranks = np.random.default_rng(4).permutation(number) + 1
    return (-exponent * np.log(ranks)).astype(np.float32)


# Single rules, at random


def oracle_of(rule: str, logits: np.ndarray, temperature: float, number: float) -> Kept:
    """Of one row, at the numbers in float32. That of `nucleus` is its top-p."""
    given = (0, np.float32(number), 0.0) if rule == "nucleus" else (np.float32(number),)
    return Kept.of(rule, logits, *map(float, (np.float32(temperature), *given)))


@pytest.mark.parametrize("rule", NUMBERS)
def test_random_rows(rule: str) -> None:
    """Flat and peaked ones, with ties and holes, at any temperature: the oracle's set and draws."""
    rng = np.random.default_rng([*NUMBERS].index(rule))
    for rows, vocab in ((2000, 512), (6, LLAMA3)):
        logits, uniforms = random_logits(rng, rows, vocab), below_one(rng.random((rows, 4)))
        temperatures, numbers = rng.choice([0.3, 1, 1, 2.5], rows), rng.choice(NUMBERS[rule], rows)
        proposal = proposal_of(temperatures, rule=rule, draws=4)
        settings = settings_of([rule] * rows, numbers)
        arrays = jnp.asarray(logits), proposal, jnp.asarray(uniforms), settings
        drawn = jax.device_get(truncated_draw(*arrays))
        decided = 0
        for row in range(rows):
            oracle = oracle_of(rule, logits[row], temperatures[row], numbers[row])
            oracle.check(
                drawn.left[row] > -np.inf, drawn.ids[row], uniforms[row].astype(np.float64)
            )
            decided += oracle.decided
        assert decided > rows / 4


@pytest.mark.parametrize(("rule", "vocab"), [*((rule, 50) for rule in NUMBERS), ("eta", 200)])
def test_frequencies(rule: str, vocab: int) -> None:
    """100,000 draws are distributed as p renormalised over the rule's tokens, in the head and
    beyond it."""
    rng, rows, number = np.random.default_rng(8), 250, NUMBERS[rule][len(NUMBERS[rule]) // 2]
    logits = np.full(256, -np.inf, np.float32)
    logits[:vocab] = rng.normal(size=vocab)
    oracle = oracle_of(rule, logits, 0.8, number)
    draws = truncated_draw(
        jnp.asarray(np.tile(logits, (rows, 1))),
        proposal_of([0.8] * rows, rule=rule),
        jnp.asarray(below_one(rng.random((rows, 400)))),
        settings_of([rule] * rows, number),
    ).ids
    left = oracle.rank < oracle.most
    assert oracle.decided
    found = np.bincount(np.ravel(draws), minlength=256)
    assert found[left].sum() == draws.size
    assert (oracle.most > prefix.HEAD) == (vocab == 200)
    expected = softmax(logits[left].astype(np.float64), 0.8) * draws.size
    assert oracle.most == 1 or stats.chisquare(found[left], expected).pvalue > 1e-4


@pytest.mark.parametrize(
    ("rule", "numbers"), [("nucleus", [0.3, 0.99]), ("typical", [0.2, 0.95]), ("top_h", [0.4, 0.9])]
)
def test_the_temperature_first_or_last(rule: str, numbers: list[float]) -> None:
    """Truncated at the temperature or at 1, in the head and beyond it; then drawn at it."""
    rng, rows = np.random.default_rng(3), 120
    logits, uniforms = random_logits(rng, rows, 1000), below_one(rng.random((rows, 4)))
    temperatures, given = rng.choice([0.5, 1.5, 4], rows), rng.choice(numbers, rows)
    last = rng.random(rows) < 0.5
    proposal = proposal_of(temperatures, top_p=given, draws=4, rule=rule)
    settings = settings_of([rule] * rows, given)
    settings = replace(settings, base=replace(settings.base, temperature_last=jnp.asarray(last)))
    arrays = jnp.asarray(logits), proposal, jnp.asarray(uniforms), settings
    drawn = jax.device_get(truncated_draw(*arrays))
    lengths = []
    for row in range(rows):
        oracle = oracle_of(rule, logits[row], 1.0 if last[row] else temperatures[row], given[row])
        if oracle.decided:
            left = np.where(oracle.rank < oracle.most, logits[row], -np.inf)
            kept = drawn.left[row] > -np.inf
            np.testing.assert_array_equal(kept, left > -np.inf)
            again = oracle_of("nucleus", left, temperatures[row], 1.0)
            again.check(kept, drawn.ids[row], uniforms[row].astype(np.float64))
            lengths.append((bool(last[row]), oracle.most > prefix.HEAD))
    assert len(lengths) > rows / 2
    assert len({*lengths}) == 4


WARPERS = {
    "typical": ("TypicalLogitsWarper", 0.9),
    "eta": ("EtaLogitsWarper", 2e-3),
    "epsilon": ("EpsilonLogitsWarper", 3e-3),
    "nucleus": ("TopPLogitsWarper", 0.9),
}


@pytest.mark.parametrize("rule", WARPERS)
def test_transformers_leaves_the_same(
    torch: ModuleType, transformers: ModuleType, rule: str
) -> None:
    """Its top-H is another rule: it adds the terms of p's own entropy, of 100 tokens at most."""
    rng, rows, (name, number) = np.random.default_rng(2), 300, WARPERS[rule]
    logits = random_logits(rng, rows, 1000)
    proposal, settings = (
        proposal_of(top_p=number, rule=[rule] * rows),
        settings_of([rule] * rows, number),
    )
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
        draws=4,
        rule=rules,
    )
    logits = jnp.asarray(random_logits(rng, rows, vocab))
    uniforms = jnp.asarray(below_one(rng.random((rows, 4))))
    return logits, proposal, uniforms, settings_of(rules, numbers)


def test_a_row_draws_the_same_in_any_batch() -> None:
    """Rows of all rules, greedy ones among them, to the bit."""
    rows = 45
    batch = mixed_batch(rows, 1000)
    together = truncated_draw(*batch)
    for row in range(rows):
        alone = truncated_draw(*row_of(batch, row))
        np.testing.assert_array_equal(alone.left[0], together.left[row])
        np.testing.assert_array_equal(alone.ids[0], together.ids[row])


def test_the_length_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes no set and no draw, but where a token lies at the bound up to rounding."""
    batch = mixed_batch(150, 1000)
    whole: Any = None  # the head is the vocabulary
    for head in (1000, 64, 2):
        monkeypatch.setattr(prefix, "HEAD", head)
        drawn = jax.device_get(jax.jit(lambda *rows: draw_rows(*rows))(*batch))
        whole = whole or drawn
        differ = np.sum((drawn.left > -np.inf) != (whole.left > -np.inf), axis=1)
        assert differ.max() <= 1
        assert np.sum(differ) <= 3
        np.testing.assert_array_equal(drawn.ids[differ == 0], whole.ids[differ == 0])


@pytest.mark.parametrize("rule", NUMBERS)
def test_temperatures_next_to_zero(rule: str) -> None:
    number = NUMBERS[rule][len(NUMBERS[rule]) // 2]
    for temperature in (1e-45, 1e-38, 1e-6):
        assert drawn_by(rule, number, [1.0, 3.0, 2.0], [LAST], temperature) == [1]


def test_nothing_is_done_in_vain() -> None:
    """A sort of 128,256 tokens costs more than all the rest of the draw: only rules that weigh the
    whole order may sort. Where no row is greedy, has a top-k or a top-p, or its temperature last,
    there is nothing to search for: that is behind conditions, one more for each rule."""
    *batch, given = jax.eval_shape(lambda: row_of(mixed_batch(1, LLAMA3), 0))
    given = replace(given, used=given.used - {"top_h", "ees", "min_k"})
    program = truncated_draw.lower(*batch, given).compile().as_text()
    assert program is not None
    assert " sort(" not in program
    logits, proposal, _, settings = mixed_batch(2, 1000)
    for used, conditions in ((frozenset({"eta", "typical"}), 5), (frozenset(), 3)):
        given = replace(settings, used=used)
        rows = contexts_of(proposal, given, logits)
        jaxpr = jax.make_jaxpr(jax.vmap(lambda *row: truncate(*row)[0]))(logits, rows)
        names = [equation.primitive.name for equation in jaxpr.eqns]
        assert not {"exp", "top_k", "sort", "cumsum"} & {*names}
        assert names.count("cond") == conditions


# Single rules, by hand


TWO_LEVELS = np.tile([0.0, -2.0], 100)  # sigma is 1
FIVE = np.log([0.5, 0.3, 0.1, 0.06, 0.04])  # H is 1.2405 nats
EVEN = np.zeros(1000)
FORTY = float(np.log2(40 * np.log(1000)))  # on Zipf's law at s = 1 mirostat's k is 2^mu / ln N


@pytest.mark.parametrize(
    ("rule", "number", "logits", "kept"),
    [
        ("top_n_sigma", 0.0, TWO_LEVELS, 100),
        ("top_n_sigma", 1.99, TWO_LEVELS, 100),
        ("top_n_sigma", 2.0, TWO_LEVELS, 200),
        ("top_n_sigma", 2.01, np.float32(1e-22) * TWO_LEVELS, 200),  # squares are none in float32
        ("eta", 0.25, FIVE, 2),  # sqrt(0.25) * exp(-H) is 0.1446
        ("eta", 0.0064, FIVE, 5),  # and sqrt(0.0064) * exp(-H) 0.0231
        ("eta", 0.05, FIVE, 4),  # epsilon is the smaller one
        ("eta", 1.0, EVEN, 1000),  # exactly exp(-H)
        ("epsilon", 0.05, FIVE, 4),
        ("epsilon", 0.9, FIVE, 1),
        ("top_a", 0.21, FIVE, 4),  # 0.21 * 0.5^2 is 0.0525
        ("top_a", 0.9, FIVE, 2),
        ("p_less", 0, FIVE, 1),  # the sum of p^2 is 0.3552
        ("p_less", 1, FIVE, 2),  # and (5 * 0.3552 - 1) / 4 is 0.194
        ("p_less", 0, EVEN, 1000),
        ("p_less", 1, EVEN, 1000),
        ("top_h", 0.5, FIVE, 1),  # the entropy of 5/8 and 3/8 is 0.6616, 0.533 of H
        ("top_h", 0.54, FIVE, 2),
        ("top_h", 0.4, EVEN, 15),  # 1000^0.4 is 15.8
        ("top_h", 1.0, EVEN, 1000),
        ("ees", 0, FIVE, 2),  # 0.6616 is above 0.8 ln 2, and 0.9369 below 0.9 ln 3
        ("ees", 0, [0.0, 0.0, -1e4], 2),
        ("ees", 0, EVEN, 1000),
        ("min_k", 0, FIVE, 2),  # ln(5 / 3) is below ln(3) / 2
        ("min_k", 10, FIVE, 3),  # 10 / ln 12.5 is 3.96
        ("min_k", 0, EVEN, 1),
        ("min_k", 3, EVEN, 1000),
        ("mirostat", FORTY, zipf(1000, 1.0), 40),
        ("mirostat", FORTY, zipf(1000, 1.0 + 1e-6), 40),
        ("mirostat", np.log2(4 * 2 / 3), zipf(3, 2.0), 2),  # (2^mu / (1 - 1/3))^(1/2)
        ("mirostat", 9.9, EVEN, 1),  # until mu reaches their surprise
        ("mirostat", 10.0, EVEN, 1000),
    ],
)
def test_sets_by_hand(rule: str, number: float, logits: np.ndarray, kept: int) -> None:
    assert kept_of(rule, number, logits) == kept


def test_typical() -> None:
    """-ln p is 0.799, 1.204, 1.897, 2.303 and H 1.235: the distances are 0.436, 0.031, 0.662,
    1.068, and the second token comes first."""
    logits = np.log([0.45, 0.30, 0.15, 0.10])
    masses = (0.29, 0.31, 0.74, 0.76, 0.91)
    assert [kept_of("typical", mass, logits) for mass in masses] == [1, 2, 2, 3, 4]
    assert drawn_by("typical", 0.89, logits, [0.0, 0.3, 0.49, 0.51, 0.85]) == [0, 0, 0, 1, 2]
    # One token of 1/4, four of 1/8, four of 1/16: H is ln 8, and the first and the last are as far
    # from it as each other. The likelier one goes before.
    tied = np.log(2) * np.array([-2, -1, -2, -1, 0, -1, -2, -1, -2])
    assert kept_of("typical", 0.7, tied) == 5
    assert drawn_by("typical", 0.7, tied, [0.0, LAST]) == [1, 7]
    # Equal tokens are equally typical, and one more may be kept by rounding.
    first, last = drawn_by("typical", 0.5, np.zeros(1000), [0.0, LAST])
    assert (first, last) in ((0, 499), (0, 500))


# Mirostat's feedback


@pytest.mark.parametrize(("target", "exponent"), [(2.0, 1.5), (3.0, 1.3), (5.0, 0.9)])
def test_a_run_of_mirostat(target: float, exponent: float) -> None:
    """Each step does what the oracle does from there, mu keeps to the oracle's path, and the mean
    surprise comes to the target."""
    steps, rate = 1500, 0.1
    logits = zipf(2000, exponent)
    uniforms = below_one(np.random.default_rng(7).random(steps))
    settings, proposal = settings_of("mirostat", 0), proposal_of(rule="mirostat")
    own = replace(settings.own["mirostat"], rate=jnp.asarray([rate]))
    aims = replace(own, target=jnp.asarray([target]))
    row = jnp.asarray(logits)[None]
    contexts = contexts_of(proposal, settings, row)

    def step(mu: jax.Array, uniform: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        # Drawn at mu; learnt from the target.
        here = {**settings.own, "mirostat": replace(own, target=mu / 2)}
        drawn = truncated_draw(row, proposal, uniform[None, None], replace(settings, own=here))
        given = replace(settings, own={**settings.own, "mirostat": aims})
        token = DrawnToken(logits=row, token=drawn.ids[:, 0])
        state = MirostatState(learnt=mu - 2 * target)
        before = replace(contexts, settings=given, own={"mirostat": state})
        after = jax.vmap(learn)(token, before).learnt + 2 * target
        bits = target - (after - mu) / rate
        return after, (mu[0], jnp.sum(drawn.left > -jnp.inf), bits[0])

    start = jnp.asarray([2 * target], jnp.float32)  # where mu begins
    record = jax.jit(lambda: lax.scan(step, start, jnp.asarray(uniforms))[1])()
    mus, kept, surprises = (np.asarray(x) for x in record)

    exact = logits.astype(np.float64)
    probabilities, oracle = softmax(exact, 1.0), Kept.of("mirostat", logits, 1.0, 0.0)

    def after(mu: float, uniform: float) -> tuple[int, int, float]:
        """The fewest and the most that `mu` keeps, and the next `mu`."""
        _, fewest, most = mirostat(exact, 1.0, mu)
        p = probabilities[oracle.by_id(most)]
        cumulated = np.cumsum(p)
        place = min(int(np.sum(cumulated <= uniform * cumulated[-1])), most - 1)
        return fewest, most, mu - rate * (-np.log2(p[place]) - target)

    path = float(mus[0])
    for i, uniform in enumerate(uniforms.astype(np.float64)):
        assert mus[i] == pytest.approx(path, abs=0.01)
        fewest, most, following = after(float(mus[i]), uniform)
        assert fewest <= kept[i] <= most
        if fewest == most and i + 1 < steps:
            assert mus[i + 1] == pytest.approx(following, abs=1e-5)
        path = after(path, uniform)[2]
    assert np.ptp(kept) >= 3
    assert abs(np.mean(surprises) - target) < 0.03
