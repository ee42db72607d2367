"""Progress and speed of runs."""

from __future__ import annotations

from unittest.mock import Mock

import jax
import pytest

from entropix_jax.cli.status import ProgressView, Speed


def test_speed_excludes_steps_that_compile() -> None:
    clock = Mock(return_value=0.0)
    speed = Speed(clock)
    # The first step waits for the compiler, two follow, another program compiles, two follow.
    for compiles, seconds, tokens in (
        (True, 20.0, 3),
        (False, 0.5, 0),  # a retracted token
        (False, 0.5, 10),
        (True, 30.0, 0),
        (False, 0.0, 1),
        (False, 1.0, 10),
    ):
        if compiles:
            jax.jit(lambda x: x + seconds)(1.0)  # noqa: B023
        clock.return_value += seconds
        speed.add(tokens)
        assert speed.value in (0.0, pytest.approx(10.0))
    assert speed.value == pytest.approx(10.0)


def test_progress_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints one line per minute. Speed and time left exclude the first step, two seconds here."""
    clock = Mock(return_value=0.0)
    monkeypatch.setattr("entropix_jax.cli.status.time", Mock(monotonic=clock))
    store, run = Mock(done=0), Mock(tokens=0, begun=False, usage="50% of slots used")
    with ProgressView(store, run, 9) as view:
        for second in range(1, 181):
            clock.return_value = float(second)
            store.done, run.tokens, run.begun = second // 60, 10 * second, second > 2
            view.looked()
    assert capsys.readouterr().err.splitlines() == [
        f"{done} of 9 done | {done * 600} tokens, 10 tok/s | 50% of slots used | {left} left"
        for done, left in ((1, "0:07:44"), (2, "0:06:53"), (3, "0:05:56"))
    ]
