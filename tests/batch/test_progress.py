"""What a batch shows of its progress."""

from __future__ import annotations

import pytest

from entropix_jax.batch.progress import ProgressView, Standing


class Clock:
    def __init__(self) -> None:
        self.now = 2.0

    def __call__(self) -> float:
        return self.now


def test_a_batch_s_speed_is_that_after_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which waited for the compiler: 20 s here, and after it 30 tokens in 3 s."""
    clock = Clock()
    monkeypatch.setattr("entropix_jax.batch.progress.time.monotonic", clock)
    standing = Standing(0, 0, 0, 0.0)
    view = ProgressView(lambda: standing, 9)
    view.looked()
    assert view.speed(standing) == 0.0
    clock.now += 20
    for tokens in (1, 2, 3):  # of one step
        standing = Standing(0, tokens, 1, 1.0)
        view.looked()
        assert view.speed(standing) == 0.0
    for _ in range(3):
        clock.now += 1
        standing = Standing(0, standing.tokens + 10, standing.steps + 1, 1.0)
        view.looked()
        assert view.speed(standing) == pytest.approx(10.0)


def test_the_lines_of_a_batch_s_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr("entropix_jax.batch.progress.time.monotonic", clock)
    standing = Standing(0, 0, 0, 0.0)
    with ProgressView(lambda: standing, 9) as view:
        clock.now += 20
        standing = Standing(0, 5, 1, 1.0)
        view.looked()
        clock.now += 50
        standing = Standing(3, 505, 101, 1.0)
        view.looked()
    line = "3 of 9 done | 505 tokens, 10 tok/s | 100% of slots used | 0:01:40 left\n"
    assert capsys.readouterr().err == line
