"""Progress and speed of runs."""

from unittest.mock import Mock

import pytest

from entropix_jax.cli.status import ProgressView


def test_progress_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints one line per minute. Speed and time left exclude the time in which programs are
    compiled, here two seconds at first and 20 later, during which no rate is shown."""
    clock = Mock(return_value=0.0)
    monkeypatch.setattr("entropix_jax.cli.status.time", Mock(monotonic=clock))
    programs = Mock(waits=None, waited=0.0)
    store, run = Mock(done=0), Mock(tokens=0, usage="50% of slots used", programs=programs)
    view = ProgressView(store, run, 9)
    for second in range(1, 181):
        clock.return_value = float(second)
        programs.waits = ("compiling: forks", 100.0) if 100 < second <= 120 else None
        programs.waited = 2.0 * (second > 2) + 20.0 * (second > 120)
        if programs.waits is None and second > 2:
            store.done, run.tokens = second // 60, run.tokens + 10
        line = view.describe()
        if second == 119:
            assert line == "1 of 9 done in 0:01:59 | 980 tokens | compiling, 19.0 s: forks"
    assert view.speed.value == pytest.approx(10.0)
    assert capsys.readouterr().err.splitlines() == [
        "1 of 9 done in 0:01:00 | 580 tokens, 10 tok/s | 0:07:44 left | 50% of slots used",
        "1 of 9 done in 0:02:00 | 980 tokens | compiling, 20.0 s: forks",
        "3 of 9 done in 0:03:00 | 1580 tokens, 10 tok/s | 0:05:16 left | 50% of slots used",
    ]
