"""Stop strings: where a text ends, and that no part of one is ever let through."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.text.stop import StopFilter


def pushed(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], str, bool]:
    """What each push lets through, what the flush adds, and whether a stop string was met."""
    stop = StopFilter[int](stops)
    out = ["".join(text for text, _ in stop.push(piece, i)) for i, piece in enumerate(pieces)]
    return out, "".join(text for text, _ in stop.flush()), stop.stopped


TEXTS = st.text("ab", max_size=3)


@given(st.lists(TEXTS.filter(bool), max_size=3), st.lists(TEXTS, max_size=8))
def test_against_whole_texts(stops: list[str], pieces: list[str]) -> None:
    out, rest, stopped = pushed(stops, pieces)
    for number, text in enumerate(itertools.accumulate(pieces)):
        let_through = "".join(out[: number + 1])
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            assert stopped
            assert let_through == text[: min(found)]
            assert "".join(out[number + 1 :]) + rest == ""
            return
        # All of the text, but for the longest end that may become a stop string.
        held = text[len(let_through) :]
        starts = {stop[:n] for stop in stops for n in range(1, len(stop))}
        ends = [text[at:] for at in range(len(text)) if text[at:] in starts]
        assert let_through + held == text
        assert held == max(ends, key=len, default="")
    assert not stopped
    assert "".join(out) + rest == "".join(pieces)


def test_each_piece_keeps_its_own_tag() -> None:
    stop = StopFilter[int](["END"])
    assert list(stop.push("xE", 1)) == [("x", 1)]
    assert list(stop.push("N", 2)) == []
    assert list(stop.push("ot E", 3)) == [("E", 1), ("N", 2), ("ot ", 3)]
    assert list(stop.flush()) == [("E", 3)]
    assert list(stop.flush()) == []
