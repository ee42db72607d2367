"""Ctrl-C and SIGTERM. These tests send real signals to their own process."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from entropix_jax.host import interrupts


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    own: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_interrupt_is_deferred_and_the_second_raises() -> None:
    calls: list[int] = []
    with interrupts.deferred_interrupts(lambda: calls.append(1)):
        press()
        assert calls == [1]
        with pytest.raises(KeyboardInterrupt):
            press()
    assert calls == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_each_signal_is_deferred_or_ignored_separately() -> None:
    """SIGTERM works in the background of a script, where Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    with interrupts.deferred_interrupts(lambda: calls.append(1), signals) as pressed:
        press()
        assert calls == []
        signal.raise_signal(signal.SIGTERM)
        assert (calls, pressed) == ([1], [signal.SIGTERM])
        with pytest.raises(SystemExit) as end:
            signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 143
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("ignored", [False, True])
def test_handlers_are_unchanged_where_signals_are_not_received(ignored: bool) -> None:
    """Only the main thread receives signals, and nohup ignores Ctrl-C."""
    handler = signal.SIG_IGN if ignored else signal.default_int_handler
    signal.signal(signal.SIGINT, handler)
    found = []

    def work() -> None:
        interrupts.exit_at_once()
        with interrupts.deferred_interrupts(lambda: None):
            found.append(signal.getsignal(signal.SIGINT))

    if ignored:
        work()
        press()
    else:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [handler]


def test_exit_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    interrupts.exit_at_once()
    press()
    signal.raise_signal(signal.SIGTERM)
    assert ends == [130, 143]
