"""Defects of the public implementations in the sampler. Each test fails if the defect exists."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from entropix_jax.engine.decode import decode
from entropix_jax.engine.state import DecodeState, Program, Recording
from entropix_jax.names import BOXES, REGIMES
from entropix_jax.sampler.draw import STREAM_DRAW, row_key
from entropix_jax.sampler.regimes import classify
from tests.support.draw_oracles import nucleus_draw, uniform_numbers
from tests.support.samplers import (
    LITERAL,
    PARTS,
    Job,
    Line,
    generate,
    metrics_of,
    params_of,
    proposal_of,
    start,
    tiny_model,
    tokens_of,
)


def frequencies(probabilities: list[float], number: int = 20_000, **rules: float) -> np.ndarray:
    """Returns how often each token is sampled, at one position of one row."""
    numbers = uniform_numbers(row_key(0, "0"), 0, STREAM_DRAW, number).astype(np.float32)
    logits = jnp.log(jnp.asarray([probabilities] * number, jnp.float32))
    drawn = nucleus_draw(logits, proposal_of(temperature=[1.0] * number, **rules), numbers[:, None])
    return np.bincount(drawn.ids[:, 0], minlength=len(probabilities)) / number


def test_defect_06_min_p_without_effect() -> None:
    """Min-p masks tokens before the softmax, so masked tokens are never sampled."""
    found = frequencies([0.1, 0.6, 0.05, 0.25], min_p=0.4)
    assert found[0] == found[2] == 0
    np.testing.assert_allclose(found, [0, 0.6 / 0.85, 0, 0.25 / 0.85], atol=0.015)


def test_defect_07_top_p_in_ascending_order() -> None:
    """Top-p keeps the most likely tokens of a flat distribution and drops the tail."""
    found = frequencies([0.02, 0.12, 0.11, 0.13, 0.12, 0.11, 0.13, 0.12, 0.12, 0.02], top_p=0.9)
    assert found[0] == found[9] == 0
    assert np.all(found[1:9] > 0.09)


def test_defect_08_one_key_for_all_steps_and_rows() -> None:
    """Rows and positions with the same distribution sample different tokens."""
    flat = params_of("temperature", {"base.temperature": 50.0})
    texts = generate(tiny_model(), [Job([5], flat, row_id=str(i)) for i in range(4)])
    tokens = np.array([tokens_of(steps) for steps in texts])
    for row in tokens:
        assert len({*row.tolist()}) > 9  # of 12
    for step in tokens.T:
        assert len({*step.tolist()}) > 1


def test_defect_09_wrong_frequencies() -> None:
    """Token frequencies are (.50, .30, .15, .05), not (.586, .261, .117, .037)."""
    expected = np.array([0.50, 0.30, 0.15, 0.05])
    number = 20_000
    found = number * frequencies(expected.tolist(), number)
    assert stats.chisquare(found, number * expected).pvalue > 1e-3


def test_defect_11_no_match_reads_as_lelv() -> None:
    """A point in no box is MID and uses that arm."""
    middle = metrics_of(entropy=2.0, varentropy=2.0)
    for preset in (LITERAL, "document-000", "document-001"):
        assert REGIMES[int(classify(middle, params_of(preset)))] == "mid"


def test_defect_12_regimes_depend_only_on_their_row() -> None:
    """Each row's regime and arm depend only on its own metrics, not on the other rows."""
    sampler = params_of(LITERAL)

    def first_steps(prompts: list[list[int]]) -> list[Line]:
        jobs = [Job(prompt, sampler, budget=1, row_id=str(i)) for i, prompt in enumerate(prompts)]
        return [lines[0] for lines in generate(tiny_model(), jobs)]

    prompts = [[50], [15], [53], [7]]
    together = first_steps(prompts)
    assert [line.regime for line in together] == ["lelv", "lehv", "hehv", "mid"]
    for row, prompt in enumerate(prompts):
        crowd = [[9, 9]] * 4
        crowd[row] = prompt
        alone = first_steps(crowd)[row]
        assert (alone.regime, alone.action) == (together[row].regime, together[row].action)
        assert math.isclose(alone.entropy, together[row].entropy, rel_tol=1e-3)


def test_defect_13_a_question_that_is_asked_once() -> None:
    """A thought is injected again after its cooldown, even if the history is full of its tokens."""
    values: dict[str, Any] = {f"regimes.{box}": ["entropy < -1"] for box in BOXES}
    values |= {"arms.mid": "inject"}
    values |= {"inject.thought": "?", "inject.cooldown": 2, "loop.max_period": 0}
    job = Job([*b"???."], params_of(LITERAL, values), budget=7)
    (lines,) = generate(tiny_model(), [job])
    assert "".join(line.action[0] for line in lines) == "ississi"


def test_defect_17_host_round_trips() -> None:
    """Many steps are one program, traced without any value, with a loop and no host callback."""
    config, params = tiny_model()
    job = Job([5, 6, 7], params_of(LITERAL))
    state = jax.eval_shape(lambda state: state, start(config, params, [job], 64))
    wanted = Program(PARTS, 64, Recording(top=3, layers=True))
    static = {"config": config, "max_steps": 32}
    for lanes in (False, True):
        run: Any = decode
        given = replace(wanted, lanes=lanes)
        program = str(run.trace(params, state, jnp.int32(0), **static, program=given).jaxpr)
        assert "while[" in program
        assert "cond[" in program  # the jaxpr includes subprograms
        assert "callback" not in program
        assert "infeed" not in program


def test_defect_17_many_steps_in_one_call() -> None:
    """Runs a whole text with every kind of action. A call ends where a fork begins or ends."""
    changes = {
        "regimes.lelv": ["entropy < 0.5"],
        "regimes.helv": ["entropy > 2.5", "varentropy < 2.5"],
        "inject.thought": "ab",
        "branch.per_row": 1,
    }
    sampler = params_of(LITERAL, changes)
    calls: list[DecodeState] = []
    job = Job([5, 6, 7], sampler, budget=24)
    (lines,) = generate(tiny_model(), [job], chunks=(64,), look=calls.append)
    assert len(tokens_of(lines)) == 24
    assert len(calls) <= 6
    assert {line.action for line in lines} >= {"argmax", "inject", "branch", "backspace"}
