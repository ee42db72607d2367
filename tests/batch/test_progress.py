"""What a batch shows of its progress."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from entropix_jax.batch.progress import ProgressView, Standing


def test_a_batch_s_speed_is_that_after_the_first_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which waited for the compiler: 20 s here, and after it 30 tokens in 3 s."""
    clock = Mock(return_value=2.0)
    monkeypatch.setattr("entropix_jax.batch.progress.time.monotonic", clock)
    standing = Standing(0, 0, 0, 0.0)
    view = ProgressView(lambda: standing, 9)
    view.looked()
    assert view.speed(standing) == 0.0
    clock.return_value += 20
    for tokens in (1, 2, 3):  # of one step
        standing = Standing(0, tokens, 1, 1.0)
        view.looked()
        assert view.speed(standing) == 0.0
    for _ in range(3):
        clock.return_value += 1
        standing = Standing(0, standing.tokens + 10, standing.steps + 1, 1.0)
        view.looked()
        assert view.speed(standing) == pytest.approx(10.0)
