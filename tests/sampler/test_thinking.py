"""When thinking and rows end: every token against an oracle that knows the next one from the last,
confidence against float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import entropix_jax
from entropix_jax.engine.state import ENDED_BY, EOS, LENGTH
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.metrics import measure_confidence
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import MAX_LIKELIEST
from tests.support.chains import CONFIG, TYPES, Chain, chain
from tests.support.logit_strategies import VOCABULARIES, rows_of
from tests.support.properties import examples
from tests.support.reference import entropy_bits
from tests.support.samplers import (
    BATCH,
    LITERAL,
    NAMES,
    PLAIN,
    Job,
    Line,
    generate,
    params_of,
    tiny_model,
)

BUDGET = 24
# Texts are bytes, of which "b" is an end token.
CHOICES: Mapping[str, Sequence[Any]] = {
    "think_end.text": ["xyz", "d", ""],
    "think_end.entropy": [0.5, 2.0, 4.5],
    "think_end.patience": [0, 1, 2, 3],
    "budget_forcing.end": ["de", "d", "", "cb"],
    "budget_forcing.wait": ["ca", "a", ""],
    "budget_forcing.min_tokens": [0, 14, 20],
    "budget_forcing.max_tokens": [0, 0, 0, 5, 15],
    "budget_forcing.times": [1, 2, 100],
    # A text with a token that is never drawn is not written.
    "draw.bans": [[], [], [], [ord("y")], [ord("a"), ord("e")]],
    "draw.bias": [[], [], [[ord("d"), -100]], [[ord("x"), -99], [ord("c"), 3]]],
}
TEXTS = ("think_end.text", "budget_forcing.end", "budget_forcing.wait")


def random_values(rng: np.random.Generator) -> dict[str, Any]:
    return {key: choices[int(rng.integers(len(choices)))] for key, choices in CHOICES.items()}


def ends_of(model: Chain) -> list[int]:
    """End tokens, two of which are likely somewhere."""
    return [ord("b"), *(int(np.argmax(model.logits(token))) for token in (0, TYPES // 2))]


def expected(model: Chain, prompt: int, v: Mapping[str, Any]) -> tuple[list[int], str, bool]:
    """Returns the tokens of a greedy row, the origin of each (argmax, think_end, budget forcing to
    wait or to end), and whether the last one is an end token."""
    row: list[int] = []
    queue: list[int] = []
    told = why = ""
    calm, waited, ends = 0, 0, ends_of(model)
    never = {*v["draw.bans"], *(token for token, bias in v["draw.bias"] if bias == -100)}

    def likeliest(last: int) -> int:
        logits = model.logits(last).copy()
        for token, bias in v["draw.bias"]:
            logits[token] += bias
        logits[v["draw.bans"]] = -np.inf
        return int(np.argmax(logits))

    def may(text: list[int]) -> bool:
        return bool(text) and not never & {*text}

    def has(text: list[int]) -> bool:
        return any(row[i : i + len(text)] == text for i in range(len(row) - len(text) + 1))

    over, end, wait = ([*v[key].encode()] for key in TEXTS)
    while len(row) < BUDGET and not (row and row[-1] in ends):
        last = row[-1] if row else prompt
        token = likeliest(last)
        if not queue:
            stops = token in ends or [token] == end[:1]
            early = stops and len(row) < v["budget_forcing.min_tokens"]
            late = 0 < v["budget_forcing.max_tokens"] <= len(row)
            why = "a"
            if 0 < v["think_end.patience"] <= calm and may(over) and not has(over):
                queue, why = [*over], "t"
            elif end and has(end):
                pass
            elif late and may(end):
                queue, why = [*end], "e"
            elif early and not late and may(wait) and waited < v["budget_forcing.times"]:
                queue, why = [*wait], "w"
                waited += 1
        quiet = entropy_bits(np.exp(model.heard(last, 0))) < v["think_end.entropy"]
        calm = calm + 1 if quiet and not queue else 0
        row.append(queue.pop(0) if queue else token)
        told += why
    return row, told, row[-1] in ends


def test_any_row() -> None:
    """Each row of a batch by its own texts and limits."""
    reached = dict.fromkeys("atew", 0)
    ended = banned = 0
    rng = np.random.default_rng(0)
    for seed in range(8):
        model = chain(rng.choice(["lelv", "lelv", "helv", "lehv", "mid"], TYPES).tolist(), seed)
        values = [random_values(rng) for _ in range(BATCH)]
        prompts = rng.integers(0, TYPES, BATCH).tolist()
        jobs = [
            Job([prompt], params_of("greedy", v), budget=BUDGET, row_id=str(i))
            for i, (prompt, v) in enumerate(zip(prompts, values, strict=True))
        ]
        found = generate((CONFIG, model.params), jobs, eos_ids=ends_of(model))
        for lines, prompt, v in zip(found, prompts, values, strict=True):
            tokens, told, stopped = expected(model, prompt, v)
            assert [line.token for line in lines] == tokens
            names = {"a": "argmax", "t": "think_end", "e": "budget_forcing", "w": "budget_forcing"}
            assert [line.action for line in lines] == [names[why] for why in told]
            assert lines[-1].status == (EOS if stopped else LENGTH)
            ended += stopped
            allowed = {
                **v,
                "draw.bans": [],
                "draw.bias": [[t, max(b, -99)] for t, b in v["draw.bias"]],
            }
            banned += told != expected(model, prompt, allowed)[1]
            for why in told:
                reached[why] += 1
    assert min(reached.values()) > 15
    assert 10 < ended < 60
    assert banned >= 5


def test_as_a_user_sees_it(tiny: LanguageModel) -> None:
    """End tokens are those of the request."""
    words = {"budget_forcing.wait": " and", "budget_forcing.min_tokens": 12}
    sampler = load_sampler("greedy").with_values(words)
    options: dict[str, Any] = {"max_new_tokens": 30, "chat": False}
    (plain,) = entropix_jax.generate(tiny, "Tom", load_sampler("greedy"), **options)
    (row,) = entropix_jax.generate(tiny, "Tom", sampler, **options)
    assert plain.finish_reason == "eos"
    assert row.text.startswith(plain.text + " and")
    assert row.to_json()["actions"]["budget_forcing"] >= 1


# Confidence

MODEL = tiny_model()
LOW = ENDED_BY + NAMES.index("confidence")
measured = jax.jit(
    lambda logits, number: measure_confidence(jax.nn.log_softmax(logits, axis=-1), number)
)


@st.composite
def distributions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Draws logits [B, V] of one of the vocabularies, and the number of top tokens, [B]."""
    vocab = draw(st.sampled_from(sorted(VOCABULARIES)))
    rows = VOCABULARIES[vocab]
    number = st.integers(2, MAX_LIKELIEST)
    return (
        np.stack([draw(rows_of(vocab)) for _ in range(rows)]),
        np.array(draw(st.lists(number, min_size=rows, max_size=rows)), np.int32),
    )


@examples(40)
@given(distributions())
def test_measures(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    """Also where logits are impossible, or as far apart as float32 goes: the measures are finite,
    as large as that. All are lowest where all tokens are equally likely."""
    logits, numbers = drawn
    found = jax.device_get(measured(jnp.asarray(logits), jnp.asarray(numbers)))
    for row, number, confidence, certainty, most in zip(logits, numbers, *found, strict=True):
        z = row.astype(np.float64) - row.max().astype(np.float64)
        log_probs = np.maximum(z - np.log(np.exp(z).sum()), -1e30)
        top = np.sort(log_probs)[::-1][:number]
        np.testing.assert_allclose(confidence, -top.mean(), rtol=1e-5, atol=2e-5)
        wanted = -(log_probs + np.log(row.size)).mean()
        np.testing.assert_allclose(certainty, wanted, rtol=2e-5, atol=5e-5)
        np.testing.assert_allclose(most, np.exp(log_probs.max()), rtol=1e-5)
        assert np.isfinite([confidence, certainty]).all()
        assert confidence >= np.log(len(top)) - 1e-5
        assert certainty >= -5e-5


# The end of a row


def job(number: int, preset: str = "temperature", window: int = 4, threshold: float = 0.0) -> Job:
    end = {"confidence.window": window, "confidence.threshold": threshold}
    changes = {**(PLAIN if preset == "temperature" else {"branch.max_share": 0.5}), **end}
    return Job([5, 6, number], params_of(preset, changes), budget=BUDGET, row_id=str(number))


def groups(lines: list[Line], window: int) -> list[float]:
    """After each line, the mean confidence of the last `window` tokens; infinite before that. What
    was retracted has been replaced."""
    confidence: dict[int, float] = {}
    found, start = [], lines[0].position
    for line in lines:
        for position, record in enumerate(line.records, line.position):
            confidence[position] = float(record.choice.observation.token_confidence)
        end = line.position + len(line.records)
        last = [confidence[position] for position in range(max(end - window, start), end)]
        found.append(float(np.mean(last)) if len(last) == window else np.inf)
    return found


@pytest.mark.parametrize("preset", ["temperature", LITERAL, "document-004"])
@pytest.mark.parametrize("window", [1, 4, 9])
def test_a_row_ends_with_the_first_low_group(preset: str, window: int) -> None:
    """Each row of a batch ends at exactly that token, as in a single run, with the same text before
    it as without a threshold. Committed branches and forced tokens do not end a row."""
    jobs = [job(number, preset, window) for number in range(6)]
    whole = generate(MODEL, jobs)
    lows = [groups(lines, window) for lines in whole]
    # Bounds halfway between two groups, so that rounding has no effect.
    steps = np.unique(np.concatenate(lows))
    bounds = (steps[:-1] + np.diff(steps) / 2)[np.isfinite(steps[1:])]
    threshold = float(bounds[len(bounds) // 3])
    asked = [job(number, preset, window, threshold if number else 0.0) for number in range(6)]
    ended = generate(MODEL, asked)
    ends = 0
    for number, (full, low, found) in enumerate(zip(whole, lows, ended, strict=True)):
        drawn = [not line.branches and line.action != "inject" for line in full]
        low_lines = (i for i, at in enumerate(low) if at < threshold and drawn[i])
        stop = next(low_lines, len(full) - 1) if number else len(full) - 1
        assert [line.tokens for line in found] == [line.tokens for line in full[: stop + 1]]
        last = LOW if stop < len(full) - 1 else LENGTH
        assert found[-1].status == last
        ends += last == LOW
    assert ends > 0
    alone = generate(MODEL, [asked[3]])[0]
    assert [line.tokens for line in alone] == [line.tokens for line in ended[3]]
    assert alone[-1].status == ended[3][-1].status


def test_the_last_token_of_the_budget_ends_a_row_for_that_reason() -> None:
    always = generate(MODEL, [replace(job(0, window=5, threshold=1e6), budget=5), job(1)])
    assert [lines[-1].status for lines in always] == [LENGTH] * 2
    cut = generate(MODEL, [job(0, window=5, threshold=1e6)])[0]
    assert (len(cut), cut[-1].status) == (5, LOW)
