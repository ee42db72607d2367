"""Triggers of lookups, against direct computations in float64."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from entropix_jax.lab import triggers
from entropix_jax.lab.triggers import FIRST, ORACLE, RANDOM, RATES, WRONG, Answers, Threshold
from entropix_jax.sampler.wrong import WrongTable
from tests.support.commands import one_error, run_command

Floats = NDArray[np.float64]
TABLE = WrongTable(np.array([1.0, 0, 0, 0, 0]), np.array([[0.0, 0.1], [2.0, 0.4], [4.0, 0.9]]))


def make_rows(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns rows of both splits. An answer of high entropy tends to be wrong, and a lookup before
    its token of the highest entropy makes it right."""
    rng = np.random.default_rng(seed)
    rows = []
    for at in range(number):
        size = int(rng.integers(1, 6))
        entropy = rng.gamma(2.0, 1.0, size)
        score = float(rng.random() > entropy.max() / 6)
        helped = [max(score, float(value == entropy.max())) for value in entropy]
        columns = {
            "entropy": entropy.tolist(),
            "varentropy": rng.random(size).tolist(),
            "max_prob": np.exp(-entropy).tolist(),
            "agreement": rng.random(size).tolist(),
            "regime": rng.choice(["lelv", "hehv"], size).tolist(),
        }
        ambiguous, test = at % 8 == 0, at % 2 == 0
        looked_up = [[each, float(rng.random()), "so"] for each in helped]
        rows.append(
            {
                "line": at + 1,
                "split": "test" if test else "tuning",
                "ambiguous": ambiguous,
                "score": score,
                "lookups": looked_up if test and not ambiguous else [],
                "samples": [str(rng.integers(2 if ambiguous else 9)) for _ in range(6)],
                **columns,
            }
        )
    return rows


def make_answers(number: int = 40) -> Answers:
    rows = [row for row in make_rows(8 * number) if row["lookups"]]
    return Answers.of(rows[:number], TABLE)


def direct_choice(levels: list[float], threshold: float, *, strict: bool) -> int:
    """Returns the version that a threshold chooses for one answer."""
    for index, level in enumerate(levels):
        if level > threshold or (level == threshold and not strict):
            return 1 + index
    return 0


@pytest.mark.parametrize("rate", [0.05, 0.125, 0.3, 0.5, 1.0])
def test_a_threshold_chooses_the_share_of_a_rate(rate: float) -> None:
    rng = np.random.default_rng(1)
    levels = np.round(rng.random((24, 4)), 1)  # with ties
    levels[rng.random(levels.shape) < 0.2] = -np.inf
    levels[:, 0] = np.maximum(levels[:, 0], 0)
    counts = rng.integers(0, 4, 24).astype(float)
    shares = Threshold.of(levels).choose(counts, rate)
    assert shares.sum(axis=1) == pytest.approx(np.ones(24))
    assert counts @ (1 - shares[:, 0]) == pytest.approx(rate * counts.sum())
    # The lowest threshold that fewer answers exceed, and the share of those that reach it.
    highest = levels.max(axis=1)
    threshold = max(c for c in highest if counts[highest >= c].sum() >= rate * counts.sum() - 1e-9)
    reach, exceed = (counts[mask].sum() for mask in (highest >= threshold, highest > threshold))
    part = (rate * counts.sum() - exceed) / (reach - exceed)
    for own, found in zip(levels.tolist(), shares, strict=True):
        expected = np.zeros(shares.shape[1])
        expected[direct_choice(own, threshold, strict=False)] += part
        expected[direct_choice(own, threshold, strict=True)] += 1 - part
        assert found == pytest.approx(expected)


def test_triggers_without_levels() -> None:
    answers = make_answers()
    even = np.ones(len(answers.sizes))
    looked_up = [answers.scores[at, 1 : 1 + size] for at, size in enumerate(answers.sizes)]
    alone = answers.scores[:, 0]
    pairs = [*zip(alone, looked_up, strict=True)]
    for rate in RATES:
        anywhere = np.mean([(1 - rate) * a + rate * b.mean() for a, b in pairs])
        first = np.mean([(1 - rate) * a + rate * b[0] for a, b in pairs])
        assert answers.accuracy(answers.shares(RANDOM, even, rate), even) == pytest.approx(anywhere)
        assert answers.accuracy(answers.shares(FIRST, even, rate), even) == pytest.approx(first)
    best = sorted((b.max() - a for a, b in pairs), reverse=True)
    for rate in RATES:
        gain = sum(best[: round(rate * len(best))])
        found = answers.accuracy(answers.shares(ORACLE, even, rate), even)
        assert found == pytest.approx((alone.sum() + gain) / len(best))


def test_area_under_the_risk_coverage_curve() -> None:
    answers = make_answers()
    counts = np.random.default_rng(2).integers(0, 3, len(answers.sizes)).astype(float)
    version = answers.sizes  # a lookup before the last token
    shares = (np.arange(answers.scores.shape[1]) == version[:, None]).astype(float)
    at = np.repeat(np.arange(len(version)), counts.astype(int))
    at = at[np.argsort(-answers.lowest[at, version[at]], kind="stable")]
    wrong = 1 - answers.scores[at, version[at]]
    # A copied answer counts at once, with the errors up to its last copy.
    last = np.searchsorted(np.flatnonzero(np.diff(at, append=-1)), np.arange(len(at)))
    ends = np.flatnonzero(np.diff(at, append=-1))[last] + 1
    expected = np.mean(wrong.cumsum()[ends - 1] / ends)
    assert answers.risk(shares, counts) == pytest.approx(expected)


def test_p_wrong_is_that_of_the_table() -> None:
    rows = [row for row in make_rows(40) if row["lookups"]]
    answers = Answers.of(rows, TABLE)
    for row, levels in zip(rows, answers.levels[WRONG], strict=True):
        means = [np.mean(row["entropy"][: 1 + at]) for at in range(len(row["entropy"]))]
        expected = np.interp(means, *TABLE.knots.T)  # all tokens weigh the same up to the fourth
        assert levels[: len(means)][:4] == pytest.approx(expected[:4])
        assert (levels[len(means) :] == -np.inf).all()


def test_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triggers, "_RESAMPLES", 50)
    table, differences = triggers.compare_triggers(make_answers(80))
    accuracy = table[table["measure"] == "accuracy"].set_index("trigger")
    assert accuracy["0%"].nunique() == 1
    value = {name: float(accuracy.loc[name, "20%"].split()[0]) for name in accuracy.index}
    assert value[ORACLE] == max(value.values())
    assert value["h"] > value[RANDOM]
    assert differences["P(wrong) minus"].tolist() == [
        *("1 - p1", "h", "regime, then h", RANDOM, FIRST)
    ]
    assert [*differences.columns[1:]] == ["5%", "10%", "20%", "50%"]


def test_rows_print_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triggers, "_RESAMPLES", 20)
    rows = [*make_rows(160), {"line": 161, "split": "test", "error": "too long"}]
    path = tmp_path / "rows.jsonl.xz"
    path.write_bytes(lzma.compress("\n".join(map(json.dumps, rows)).encode()))
    found = run_command("lookups", "--rows", path)
    assert found.status == 0
    assert "80 tuning and 60 test answers" in found.out
    assert "1 questions no answer" in found.out
    assert "| random, first token" in found.out
    assert "Calibration error of P(wrong) at tokens: 0." in found.out
    assert "| intent entropy" in found.out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no JSON", "line 1 is not a result of lookups"),
        ('{"split": "test", "score": 1.0}', "line 1 is not a result of lookups"),
        ('{"split": "test", "error": "too long"}', "both splits need an answer"),
    ],
)
def test_refused_rows(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content + "\n")
    one_error(run_command("lookups", "--rows", path), message)
