"""The embedded model as it is shipped: its regimes, its calibration, and what others read in it."""

import json
from collections import Counter

import pytest

from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.model.loading import CALIBRATION_FILE, LanguageModel
from entropix_jax.names import REGIMES
from entropix_jax.sampler.presets import load_sampler
from tests.support.runs import Spec, run_specs

pytestmark = pytest.mark.slow


def test_all_regimes_occur_in_ordinary_text(tiny: LanguageModel) -> None:
    """10,000 tokens of the default sampler, from nothing: each regime at least 20 times."""
    start = tiny.tokenizer.encode("", add_bos=True)
    requests = [Spec(start, str(row), 500) for row in range(20)]
    rows = run_specs(tiny, requests, ignore_eos=True).run()
    tokens = [token for row in rows for token in row.tokens]
    assert len(tokens) == 10_000
    counts = Counter(token.regime for token in tokens)
    assert all(counts[regime] >= 20 for regime in REGIMES), counts
    actions = Counter(token.action for token in tokens)
    served = ("argmax", "inject", "branch", "backspace", "resample", "adaptive", "sample")
    assert all(actions[action] for action in served), actions
    # With a branching budget that never runs out, nothing is explored instead.
    assert set(actions) == {*served}


def test_the_default_sampler_takes_the_measured_thresholds(tiny: LanguageModel) -> None:
    thresholds = json.loads((tiny.folder / CALIBRATION_FILE).read_text())["thresholds"]
    sampler = calibrate_sampler(load_sampler("entropix"), tiny)
    assert sampler.notes == ()
    assert {k: sampler.values[f"thresholds.{k}"] for k in thresholds} == thresholds


def test_the_loop_guard_breaks_a_loop_and_leaves_others_alone(tiny: LanguageModel) -> None:
    """Greedy rows, some of which say the same over and over; the guard alone makes them LEHV."""
    prompts = ["Guests:", "7 7 7 7", "12 + 7 =", "Once upon a time", "Dear diary"]
    requests = [
        Spec(tiny.tokenizer.encode(prompt, add_bos=True), str(i), 240)
        for i, prompt in enumerate(prompts)
    ]
    greedy = load_sampler("greedy").with_values(
        {"regimes.lehv": ["entropy < -1"], "arms.lehv": "resample"}
    )
    guarded = greedy.with_values({"loop.max_period": 32, "loop.repeats": 3})
    plain = run_specs(tiny, requests, greedy, ignore_eos=True).run()
    broken = run_specs(tiny, requests, guarded, ignore_eos=True).run()
    looped = 0
    for free, row in zip(plain, broken, strict=True):
        tokens, got = ([token.token_id for token in each.tokens] for each in (free, row))
        expected = in_a_loop(tokens)
        first = expected.index(True) if True in expected else len(tokens)
        assert got[:first] == tokens[:first]
        assert [token.loop for token in row.tokens] == in_a_loop(got)
        if first < len(tokens):
            looped += 1
            assert row.tokens[first].action == "resample"
            assert sum(token.loop for token in row.tokens) < sum(expected)
    assert 0 < looped < len(prompts)


def in_a_loop(tokens: list[int]) -> list[bool]:
    """Of each place whether three copies of a stretch of at most 32 tokens stand before it."""
    return [
        any(
            3 * n <= end and tokens[end - 3 * n : end - n] == tokens[end - 2 * n : end]
            for n in range(1, 33)
        )
        for end in range(len(tokens))
    ]
