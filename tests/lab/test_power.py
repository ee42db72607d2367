"""Power sampling and samples of whole texts: a chain's distribution against enumeration."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from entropix_jax.engine.engine import Engine
from entropix_jax.engine.preparation import calibrate_sampler
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.state import Recording
from entropix_jax.errors import UserError
from entropix_jax.lab.power import (
    Chain,
    Cuts,
    anywhere,
    at_jumps,
    log_ratio,
    power_sampler,
    proposal_logprob,
    sample_power,
)
from entropix_jax.lab.samples import draw_samples, mean_logprob
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from tests.support.models import teacher_forced
from tests.support.reference import entropy_bits, log_softmax

CUTS = (anywhere, at_jumps)
ALPHA = 3.0
FLAT = 0.1  # an alpha under which the texts of the random model are all likely enough
END = 2
Text = tuple[int, ...]


def texts_of(budget: int) -> Iterator[Text]:
    """All texts of the tokens 0, 1 and END that end with END, or are as long as the budget."""
    for length in range(1, budget + 1):
        for text in itertools.product(range(3), repeat=length):
            if END not in text[:-1] and (text[-1] == END or length == budget):
                yield text


# The acceptance


@cache
def scores(before: Text) -> np.ndarray:
    """The logits of a made-up model."""
    return 2.0 * np.random.default_rng([7, *before]).normal(size=3)


def read(text: Text) -> list[Any]:
    """A text's tokens, with what a chain reads of them."""
    tokens = []
    for i, token in enumerate(text):
        log_p, log_q = log_softmax(scores(text[:i])), log_softmax(ALPHA * scores(text[:i]))
        state = SimpleNamespace(own={"power": SimpleNamespace(logprob=log_q[token])})
        entropy = entropy_bits(np.exp(log_p))
        tokens.append(SimpleNamespace(logprob=log_p[token], entropy=entropy, state=state))
    return tokens


@pytest.mark.parametrize("cuts", CUTS)
def test_a_step_leaves_the_target_as_it_is(cuts: Cuts) -> None:
    """Detailed balance, of each pair of texts and each cut that leads from one to the other."""
    texts = list(texts_of(4))
    tokens = {text: read(text) for text in texts}
    target = {x: math.exp(ALPHA * sum(t.logprob for t in tokens[x])) for x in texts}
    flows = {}
    for x, y in itertools.product(texts, repeat=2):
        for cut in range(len(x)):
            if x[:cut] != y[:cut] or cut >= len(y):
                continue
            weights = cuts([t.entropy for t in tokens[x]])
            drawn = math.exp(sum(t.state.own["power"].logprob for t in tokens[y][cut:]))
            takes = math.exp(min(log_ratio(tokens[x], tokens[y], cut, ALPHA, cuts), 0.0))
            flows[x, y, cut] = target[x] * weights[cut] / sum(weights) * drawn * takes
    assert len(flows) > 500
    for (x, y, cut), flow in flows.items():
        assert flow == pytest.approx(flows[y, x, cut], rel=1e-9)


# Chains on a model


ALLOWED = (5, 17, 40)  # tokens, the last one ends a text


def only_allowed(logits: Any, ctx: Any) -> Any:
    allowed = jnp.zeros(logits.shape, bool).at[jnp.array(ALLOWED)].set(True)
    return jnp.where(allowed, logits, -jnp.inf)


def chains_of(
    model: LanguageModel,
    number: int,
    alpha: float = FLAT,
    *,
    slots: int = 16,
    budget: int = 4,
    **options: Any,
) -> list[Chain]:
    sampler = calibrate_sampler(power_sampler(alpha).with_logits("only", only_allowed), model)
    requests = [
        Request((1, 2, 3), sampler, budget, row_id=f"c{i}", eos_ids=ALLOWED[-1:], tag=i)
        for i in range(number)
    ]
    engine = Engine(model, slots=slots, capacity=64, recording=Recording(state=True))
    options = {"block": 2, "steps": 6, **options}
    found = sorted(sample_power(engine, requests, **options), key=lambda c: int(c.request.tag))
    assert [chain.row.request for chain in found] == requests
    assert sum(chain.forwards for chain in found) == engine.useful
    return found


def text_of(row: Row) -> Text:
    return tuple(ALLOWED.index(token.token_id) for token in row.tokens)


def target_of(model: LanguageModel, budget: int, alpha: float) -> dict[Text, float]:
    """p^alpha, normalised, of all texts."""
    texts = list(texts_of(budget))
    tokens = np.zeros((len(texts), 3 + budget), np.int32)
    tokens[:, :3] = 1, 2, 3
    for one, text in zip(tokens, texts, strict=True):
        one[3 : 3 + len(text)] = [ALLOWED[i] for i in text]
    log_p = log_softmax(teacher_forced(model.params, model.config, tokens)[0])
    totals = [
        alpha * sum(log_p[i, 2 + at, ALLOWED[token]] for at, token in enumerate(text))
        for i, text in enumerate(texts)
    ]
    return dict(zip(texts, np.exp(log_softmax(np.asarray(totals))), strict=True))


def chance(found: Sequence[Text], target: dict[Text, float]) -> float:
    """The p-value of a chi-squared test; texts that are seldom are one."""
    counts, number = Counter(found), len(found)
    often = [text for text, p in target.items() if number * p >= 5]
    seen = [counts[text] for text in often]
    wanted = [number * target[text] for text in often]
    rest = number - sum(wanted)
    if rest > 1:
        seen, wanted = [*seen, number - sum(seen)], [*wanted, rest]
    return float(stats.chisquare(seen, np.asarray(wanted) * sum(seen) / sum(wanted)).pvalue)


@pytest.mark.parametrize("cuts", CUTS)
def test_chains_have_the_distribution_of_whole_texts(model: LanguageModel, cuts: Cuts) -> None:
    """That of its proposals is another one, which this many chains tell apart."""
    target = target_of(model, 4, FLAT)
    found = chains_of(model, 250, steps=8, cuts=cuts)
    assert all(chain.proposed == 16 for chain in found)
    assert chance([text_of(chain.row) for chain in found], target) > 0.01
    proposals = chains_of(model, 250, steps=0)
    assert all(chain.forwards == len(chain.row.tokens) for chain in proposals)
    assert chance([text_of(chain.row) for chain in proposals], target) < 1e-6


def test_a_chain_depends_on_its_seed_and_id_alone(model: LanguageModel) -> None:
    chains, others = (chains_of(model, 12, slots=slots, budget=7) for slots in (16, 3))
    for chain, other in zip(chains, others, strict=True):
        assert text_of(chain.row) == text_of(other.row)
        for name in ("forwards", "proposed", "accepted"):
            assert getattr(chain, name) == getattr(other, name)
        assert chain.row.finish_reason == ("eos" if text_of(chain.row)[-1] == END else "length")
    assert len({text_of(chain.row) for chain in chains}) > 1


def test_tokens_note_what_they_were_drawn_from(model: LanguageModel) -> None:
    """Against a reading of the whole text in float64: p of all tokens, q of those allowed."""
    for chain in chains_of(model, 12, alpha=0.3, budget=7):
        text = [1, 2, 3, *(token.token_id for token in chain.row.tokens)]
        tokens = np.array([text + [0] * (10 - len(text))], np.int32)
        logits = teacher_forced(model.params, model.config, tokens)[0][0]
        for i, token in enumerate(chain.row.tokens, 2):
            log_q = log_softmax(0.3 * logits[i][list(ALLOWED)].astype(np.float64))
            expected = log_softmax(logits[i])[token.token_id], log_q[ALLOWED.index(token.token_id)]
            np.testing.assert_allclose(
                [token.logprob, proposal_logprob(token)], expected, atol=1e-4
            )


def of_tiny(tiny: LanguageModel, alpha: float) -> list[Request]:
    prompt = tiny.tokenizer.encode("Once upon a time", add_bos=True)
    sampler = calibrate_sampler(power_sampler(alpha), tiny)
    ends = tiny.end_ids(chat=False)
    return [Request(prompt, sampler, 16, f"c{i}", eos_ids=ends) for i in range(16)]


def test_likelihood_rises_with_alpha(tiny: LanguageModel) -> None:
    """Chains of different alphas run side by side. With 1 the proposal is the target."""
    engine = Engine(tiny, slots=16, capacity=64, recording=Recording(state=True))
    alphas = (1.0, 2.0, 4.0)
    wanted = [replace(r, tag=alpha) for alpha in alphas for r in of_tiny(tiny, alpha)]
    found = list(sample_power(engine, wanted, block=8, steps=4))
    of = {alpha: [c for c in found if c.request.tag == alpha] for alpha in alphas}
    assert all(chain.accepted == chain.proposed == 8 for chain in of[1.0])
    assert any(chain.accepted < chain.proposed for chain in of[4.0])
    means = [np.mean([mean_logprob(chain.row) for chain in of[alpha]]) for alpha in alphas]
    assert sorted(means) == means


def test_samples(tiny: LanguageModel) -> None:
    engine = Engine(tiny, slots=16, capacity=64, recording=Recording(state=True))
    drawn = {one.request.row_id: one for one in draw_samples(engine, of_tiny(tiny, 1.0)[:4], 3)}
    assert sorted(drawn) == ["c0", "c1", "c2", "c3"]
    assert sum(one.forwards for one in drawn.values()) == engine.useful
    for name, one in drawn.items():
        assert [row.request.row_id for row in one.rows] == [f"{name}/{i}" for i in (1, 2, 3)]
        means = [np.mean([token.logprob for token in row.tokens]) for row in one.rows]
        assert one.best(mean_logprob) is one.rows[int(np.argmax(means))]
        found = dict(zip((row.text for row in one.rows), (None, "a", "b"), strict=True))
        if len(found) == 3:
            assert one.vote(found.get) == "a"


def test_mistakes_are_told(tiny: LanguageModel) -> None:
    (request, *_), sampler = of_tiny(tiny, 2.0), load_sampler("temperature")
    engine = Engine(tiny, slots=16, capacity=64, recording=Recording(state=True))
    with pytest.raises(UserError, match="alpha = 0: must be between"):
        power_sampler(0)
    for block, steps, told in (
        (0, 1, "block must be at least 1, not 0"),
        (1, -1, "steps must be at least 0, not -1"),
    ):
        with pytest.raises(UserError, match=told):
            next(sample_power(engine, [request], block=block, steps=steps))
    other = replace(request, sampler=calibrate_sampler(sampler, tiny))
    with pytest.raises(UserError, match="row 'c0': its sampler must be a power_sampler"):
        next(sample_power(engine, [other], block=1, steps=1))
    forgotten: Any = SimpleNamespace(state=None)
    with pytest.raises(UserError, match="power sampling needs an engine"):
        proposal_logprob(forgotten)
