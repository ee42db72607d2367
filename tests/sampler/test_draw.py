"""The truncated draw against a float64 oracle that sorts, and against its own probabilities."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from entropix_jax.sampler import draw
from entropix_jax.sampler.draw import HEAD, Drawn
from entropix_jax.sampler.proposal import Proposal
from entropix_jax.sampler.settings import TruncationSettings
from tests.support.draw_oracles import (
    LAST,
    LLAMA3,
    Oracle,
    below_one,
    one_against,
    random_logits,
    random_uniforms,
)
from tests.support.samplers import proposal_of


def nucleus_draw(logits: jax.Array, proposal: Proposal, uniforms: jax.Array) -> Drawn:
    """The draw under min-p, top-k and top-p; all numbers of the other rules are NaN."""
    nothing = jnp.full(logits.shape[0], jnp.nan, jnp.float32)
    truncation = TruncationSettings(
        **dict.fromkeys(TruncationSettings.__dataclass_fields__, nothing)
    )
    return draw.truncated_draw(logits, proposal, uniforms, truncation, nothing)


truncated_draw = jax.jit(nucleus_draw)


def check(
    logits: np.ndarray, proposal: Proposal, uniforms: np.ndarray, drawn: Drawn | None = None
) -> None:
    """Compares each row of a batch with the oracle."""
    drawn = drawn or truncated_draw(jnp.asarray(logits), proposal, jnp.asarray(uniforms))
    for row in range(logits.shape[0]):
        oracle = Oracle(logits[row], proposal, row)
        number = int(proposal.draws[row])
        ids = np.asarray(drawn.ids[row])[:number]
        oracle.check(int(drawn.kept[row]), ids, uniforms[row, :number].astype(np.float64))


@pytest.mark.parametrize(
    ("vocab", "rows"),
    [(2, 300), (50, 300), (HEAD, 300), (HEAD + 1, 300), (1000, 300), (LLAMA3, 24)],
)
def test_random_rows(vocab: int, rows: int) -> None:
    rng = np.random.default_rng(vocab)
    proposal = proposal_of(
        temperature=rng.choice([0, 0.3, 0.666, 1, 2, 30], size=rows),
        top_k=rng.choice(
            [0, 1, 5, HEAD - 1, HEAD, HEAD + 1, 100, 700, vocab, 2**31 - 1], size=rows
        ),
        top_p=rng.choice([1e-6, 0.01, 0.5, 0.9, 0.99, 0.9999, 1], size=rows),
        min_p=rng.choice([0, 1e-4, 0.03, 0.5, 1], size=rows, p=[0.4, 0.2, 0.2, 0.1, 0.1]),
        draws=16,
    )
    check(random_logits(rng, rows, vocab), proposal, random_uniforms(rng, rows, 16))


@pytest.mark.parametrize("head", [3, HEAD])
def test_every_setting_of_a_small_vocabulary(monkeypatch: pytest.MonkeyPatch, head: int) -> None:
    """Every top-k with many top-p and min-p over ties. A short head sends nearly all rows deep."""
    monkeypatch.setattr(draw, "HEAD", head)
    values = np.log([0.3, 0.2, 0.2, 0.1, 0.1, 0.1]).astype(np.float32)
    logits = np.append(values, -np.inf).astype(np.float32)[[3, 1, 6, 0, 4, 2, 5]]
    grid = np.meshgrid(
        [0, 0.5, 1, 2],
        range(9),
        [1e-6, 0.15, 0.31, 0.49, 0.51, 0.75, 0.95, 1],
        [0, 0.2, 0.35, 0.6, 0.7, 1],
    )
    temperature, top_k, top_p, min_p = (axis.ravel() for axis in grid)
    rows = temperature.size
    rng = np.random.default_rng(1)
    proposal = proposal_of(temperature, top_k, top_p, min_p, draws=6)
    uniforms = random_uniforms(rng, rows, 6)
    batch = np.tile(logits, (rows, 1))
    drawn = jax.jit(lambda *args: nucleus_draw(*args))(
        jnp.asarray(batch), proposal, jnp.asarray(uniforms)
    )
    check(batch, proposal, uniforms, drawn)


ADVERSARIAL: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "uniform": lambda rng: np.zeros(LLAMA3),
    "uniform at 1e4": lambda rng: np.full(LLAMA3, 1e4),
    "one token of probability 1": lambda rng: one_against(-200.0),
    "one token of half the mass": lambda rng: one_against(-np.log(LLAMA3 - 1)),
    "a tail of denormals": lambda rng: one_against(-95.0),
    "a tail under float32's epsilon": lambda rng: one_against(-17.0),
    "a long slope": lambda rng: -1e-4 * np.arange(LLAMA3),
    "two levels": lambda rng: np.where(np.arange(LLAMA3) % 2 == 0, 0.0, -1.1),
    "tiny differences": lambda rng: 1e-6 * rng.normal(size=LLAMA3),
    "at +-1e4": lambda rng: rng.choice([-1e4, 1e4], size=LLAMA3),
    "at +-3e38": lambda rng: rng.choice([-3e38, 3e38], size=LLAMA3),
    "zeros of both signs": lambda rng: rng.choice([-0.0, 0.0], size=LLAMA3),
    "mostly impossible": lambda rng: np.where(np.arange(LLAMA3) % 400 == 3, 0.3, -np.inf),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_rounding(name: str) -> None:
    rng = np.random.default_rng(5)
    logits = ADVERSARIAL[name](rng).astype(np.float32)
    proposal = proposal_of(
        temperature=[1, 1, 0.3, 2, 1, 1, 1, 0],
        top_k=[0, 0, 0, 0, 100_000, 1000, 300, 0],
        top_p=[1, 0.5, 0.999, 0.1, 0.5, 1, 0.9, 0.5],
        min_p=[0, 0, 0, 0, 0, 1e-4, 1e-38, 0],
        draws=4,
    )
    check(np.tile(logits, (8, 1)), proposal, random_uniforms(rng, 8, 4))


def test_the_order_of_the_rules() -> None:
    """min-p by the whole distribution, top-k next, top-p by the mass that these left."""
    logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1]]))
    uniforms = jnp.asarray([[LAST]])

    def kept(**rules: float) -> int:
        return int(truncated_draw(logits, proposal_of(**rules), uniforms).kept[0])

    assert kept(top_p=0.55) == 2
    assert kept(top_p=0.55, top_k=2) == 1  # 0.4 of 0.7 is 0.571
    assert kept(top_p=0.75, top_k=3) == 2  # 0.7 of 0.9 is 0.778
    assert kept(top_p=0.75, min_p=0.3) == 2  # the last one is less than 0.3 of the first
    assert kept(top_p=0.75) == 3
    assert kept(min_p=0.51) == 2
    # A temperature comes before all of them: 0.4, 0.3, 0.2, 0.1 squared are 16, 9, 4, 1.
    assert kept(min_p=0.51, temperature=0.5) == 2
    assert kept(min_p=0.6, temperature=0.5) == 1
    assert kept(top_p=0.55, temperature=0.5) == 2  # 16 of 30 is 0.533
    assert kept(top_p=0.5, temperature=0.5) == 1


@pytest.mark.parametrize(
    ("vocab", "spread", "rules"),
    [
        (5, 1.0, {}),
        (50, 1.0, {"temperature": 0.666, "top_k": 27, "top_p": 0.9, "min_p": 0.03}),
        (50, 2.0, {"temperature": 2.0, "top_p": 0.5}),
        (1000, 0.3, {}),
        (1000, 0.3, {"top_p": 0.95}),
        (1000, 0.3, {"top_k": 400, "temperature": 0.5}),
        (1000, 1.0, {"min_p": 0.05, "top_k": 600, "top_p": 0.99}),
        (1000, 0.0, {"top_k": 301}),
    ],
)
def test_frequencies(vocab: int, spread: float, rules: dict[str, float]) -> None:
    rng = np.random.default_rng(8)
    number = 20_000
    logits = (spread * rng.normal(size=vocab)).astype(np.float32)
    uniforms = below_one(rng.random((1, number)))
    proposal = proposal_of(**rules, draws=number)
    drawn = truncated_draw(jnp.asarray(logits)[None], proposal, jnp.asarray(uniforms))
    oracle = Oracle(logits, proposal)
    expected = number * oracle.probabilities()
    observed = np.bincount(drawn.ids[0], minlength=vocab)[oracle.order[: expected.size]]
    assert observed.sum() == number
    likely = expected >= 5  # rare tokens count together
    observed = np.append(observed[likely], observed[~likely].sum())
    expected = np.append(expected[likely], expected[~likely].sum())
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-3


def test_top_p_at_an_exact_tie_keeps_the_token_that_reaches_it() -> None:
    """Of equal tokens one half makes up p = 0.5, in the head and in the whole vocabulary."""
    for vocab in (40, 1000):
        logits = np.zeros((1, vocab), np.float32)
        proposal = proposal_of(top_p=0.5)
        drawn = truncated_draw(jnp.asarray(logits), proposal, jnp.zeros((1, 4), jnp.float32))
        assert int(drawn.kept[0]) == vocab // 2
    # Of 128 tokens and 256 that are half as likely, the first 128.
    half = np.float32(np.log(0.5))
    assert float(jax.jit(jnp.exp)(half)) == 0.5
    logits = np.full((1, 1000), -np.inf, np.float32)
    logits[0, 100:484] = half
    logits[0, 300:428] = 0.0
    numbers = jnp.asarray([[0.0, 0.5, LAST, LAST]], jnp.float32)
    drawn = truncated_draw(jnp.asarray(logits), proposal_of(top_p=0.5, draws=4), numbers)
    assert int(drawn.kept[0]) == 128
    assert drawn.ids[0].tolist() == [300, 364, 427, 427]


def test_what_rounding_leaves_at_the_whole_mass_is_the_last_token() -> None:
    """Two sums of the same masses may differ in their last bit: a target may not be exceeded."""
    crossing: Any = jax.jit(draw._crossing, static_argnames="reach")
    order = jnp.asarray([3, -9, 3, 7, -5, 3], jnp.int32)
    weights = jnp.asarray([0.5, 0.0, 0.5, 2.0, 0.0, 0.5], jnp.float32)
    for target in (3.5, 3.500001, 4.0):
        for reach in (False, True):
            value, index = crossing(order, weights, jnp.float32(target), reach=reach)
            assert (int(value), int(index)) == (3, 2)
    value, index = crossing(order, weights, jnp.float32(2.9))
    assert (int(value), int(index)) == (3, 1)
