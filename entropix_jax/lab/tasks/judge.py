"""Judges whether a text could have been written in the tiny world, hesitations aside.

A sampler may inject `Wait...` anywhere, which says nothing about the model, so it is removed before
a text is judged. So are hesitations of the model itself, as the two look the same.
"""

import re
from collections.abc import Iterator
from functools import lru_cache

from entropix_jax.lab.world.documents import stream
from entropix_jax.lab.world.facts import World
from entropix_jax.lab.world.grammar import Choice, ImpossibleText, replay
from entropix_jax.lab.world.lexicon import BEGIN, PAUSE, WAIT, split_pieces, split_terminals

PAUSED = r" \.\.\."
WAITED = r" ?Wait\.\.\."

_HESITATION = re.compile(f"({PAUSED}|{WAITED})")
_MARK = f"{WAIT}..."
_Pieces = tuple[str, ...]


def remove_hesitations(world: World, prompt: str, text: str) -> str:
    """Removes the hesitations from a continuation of a prompt.

    With `Wait...` goes its restatement: the words that the world itself restates there or, if the
    world would not hesitate, any repetition of the words just before; either may be cut by the
    text's end. Of several readings, the one that stays possible the longest is chosen, then the
    one that keeps the most. `Wait...` stays only where the world needs it: before worked sums.
    """
    before = split_terminals(f"{BEGIN}{prompt}")
    pieces: list[str] = []
    for index, stretch in enumerate(_HESITATION.split(text)):
        if index % 2 == 0:
            pieces += split_pieces(stretch)
        elif stretch != PAUSE and pieces[-1:] != [_MARK]:
            pieces.append(_MARK)
    *_, said = _read(world, before, tuple(pieces))
    return "".join(said[len(before) :])


def score_possible_share(world: World, prompt: str, text: str) -> float:
    """The share of a continuation's words before the first impossible one; 0 for an empty text.

    A last word that is cut, as by the budget, counts as possible.
    """
    before = split_terminals(f"{BEGIN}{prompt}")
    pieces = split_pieces(text)
    possible, upcoming = _follow(world, (*before, *pieces))
    possible -= len(before)
    rest = "".join(pieces[possible:])
    if pieces and _cut(upcoming, rest):
        return 1.0
    return possible / len(pieces) if pieces else 0.0


def _read(world: World, said: _Pieces, pieces: _Pieces) -> tuple[int, int, int, _Pieces]:
    """The best reading of `pieces` after `said`: its rank and its terminals.

    Readings are ranked, lower first, by the pieces after the first impossible one, the hesitations
    kept, and the negative length.
    """
    mark = pieces.index(_MARK) if _MARK in pieces else len(pieces)
    start = len(said)
    said += pieces[:mark]
    possible, upcoming = _follow(world, said)
    rest = pieces[mark + 1 :]
    if possible < len(said) or mark == len(pieces):
        whole = (*said, *(piece for piece in rest if piece != _MARK))
        return len(pieces) - (possible - start), whole.count(WAIT), -len(whole), whole
    ways = [_read(world, said, rest)]
    if WAIT in upcoming.terminals:
        hesitating = (*said, WAIT, "...")
        lengths = list(_restated(world, upcoming, hesitating, rest))
        if len(_words(upcoming)) == 1:
            ways.append(_read(world, hesitating, rest))
    else:
        lengths = list(_repeated(said, rest))
    ways += [_read(world, said, rest[length:]) for length in lengths if length > 0]
    return min(ways)


def _restated(world: World, fork: Choice, hesitating: _Pieces, rest: _Pieces) -> Iterator[int]:
    """Lengths of the world's own restatement: the numbers of pieces after which it is back at the
    fork, or the end of the text."""
    words = _words(fork)
    again = False
    for length, piece in enumerate(("", *rest)):
        if piece not in ("", _MARK):
            hesitating += (piece,)
        possible, upcoming = _follow(world, hesitating)
        if possible < len(hesitating):
            if not again and _cut(upcoming, "".join(rest[length - 1 :])):
                yield len(rest)
            return
        if _words(upcoming) == words:
            again = True
            yield length
            if len(words) > 1:
                return
    if not again:
        yield len(rest)


def _repeated(said: _Pieces, rest: _Pieces) -> Iterator[int]:
    """Lengths of repetitions of the words just said, possibly cut by the end of the text."""
    words = [(index, piece) for index, piece in enumerate(rest, 1) if piece != _MARK]
    text = "".join(word for _, word in words).lstrip(" ")
    for count in range(1, len(said)):
        again = "".join(said[-count:]).lstrip(" ")
        if count <= len(words) and "".join(w for _, w in words[:count]).lstrip(" ") == again:
            yield words[count - 1][0]
        elif text and again.startswith(text):
            yield len(rest)


def _cut(upcoming: Choice, text: str) -> bool:
    """Whether a text is the beginning of a possible terminal or of a hesitation."""
    return any(terminal.startswith(text) for terminal in (*upcoming.terminals, PAUSE, _MARK))


def _words(choice: Choice) -> list[str]:
    """The possible terminals other than hesitations."""
    return [terminal for terminal in choice.terminals if terminal not in (PAUSE, WAIT)]


@lru_cache(maxsize=1024)
def _follow(world: World, terminals: _Pieces) -> tuple[int, Choice]:
    """The number of terminals before the first impossible one in a stream of documents, and what
    may follow them. Sums of all splits are possible."""
    try:
        upcoming = replay(stream(world, split=None), terminals).upcoming
    except ImpossibleText as impossible:
        return _follow(world, terminals[: impossible.index])
    assert upcoming is not None  # streams are endless
    return len(terminals), upcoming
