"""Whether a text could have been written in the tiny world, hesitations aside.

A sampler may put `Wait...` anywhere into a text. That is the sampler's own and tells nothing of the
model, so it is left out before a text is judged; a hesitation that the model writes itself is left
out as well, since the two look the same.
"""

import re
from collections.abc import Iterator
from functools import lru_cache

from entropix_jax.world.documents import stream
from entropix_jax.world.facts import World
from entropix_jax.world.grammar import Choice, ImpossibleText, replay
from entropix_jax.world.lexicon import BEGIN, PAUSE, WAIT, pieces_of, terminals_of

PAUSED = r" \.\.\."
WAITED = r" ?Wait\.\.\."

_HESITATION = re.compile(f"({PAUSED}|{WAITED})")
_MARK = f"{WAIT}..."
_Pieces = tuple[str, ...]


def leave_out_hesitations(world: World, prompt: str, text: str) -> str:
    """A continuation of a prompt as it would stand had nobody hesitated.

    With `Wait...` go the words that are restated after it: those that the world itself restates
    there or, where nobody would hesitate, any that were just said; also where the text breaks off
    within them. What else follows it stays. Of several ways to read a text, the one that stays
    possible the longest is meant, and of those the one that leaves the most of it. `Wait...` itself
    stays only where the world goes on in no other way: to show its work.
    """
    before = terminals_of(f"{BEGIN}{prompt}")
    pieces: list[str] = []
    for index, stretch in enumerate(_HESITATION.split(text)):
        if index % 2 == 0:
            pieces += pieces_of(stretch)
        elif stretch != PAUSE and pieces[-1:] != [_MARK]:
            pieces.append(_MARK)
    *_, said = _read(world, before, tuple(pieces))
    return "".join(said[len(before) :])


def share_possible(world: World, prompt: str, text: str) -> float:
    """Which share of a continuation's words comes before the first that is impossible there.

    A last word that is cut, as may be where a budget ends, is none. An empty text has a share of 0.
    """
    before = terminals_of(f"{BEGIN}{prompt}")
    pieces = pieces_of(text)
    possible, upcoming = _follow(world, (*before, *pieces))
    possible -= len(before)
    rest = "".join(pieces[possible:])
    if pieces and _cut(upcoming, rest):
        return 1.0
    return possible / len(pieces) if pieces else 0.0


def _read(world: World, said: _Pieces, pieces: _Pieces) -> tuple[int, int, int, _Pieces]:
    """The best way to read what comes after what was said: the whole, after what makes it the
    least: the pieces that it does not reach, the hesitations that it keeps, its length, negated.
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
    """After how many pieces the world stands at the fork again where somebody hesitated, or the
    text ends before that.
    """
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
    """After how many pieces the last things said have been said again, perhaps up to a cut."""
    words = [(index, piece) for index, piece in enumerate(rest, 1) if piece != _MARK]
    text = "".join(word for _, word in words).lstrip(" ")
    for count in range(1, len(said)):
        again = "".join(said[-count:]).lstrip(" ")
        if count <= len(words) and "".join(w for _, w in words[:count]).lstrip(" ") == again:
            yield words[count - 1][0]
        elif text and again.startswith(text):
            yield len(rest)


def _cut(upcoming: Choice, text: str) -> bool:
    """Whether a text may be a terminal that is cut, or a hesitation."""
    return any(terminal.startswith(text) for terminal in (*upcoming.terminals, PAUSE, _MARK))


def _words(choice: Choice) -> list[str]:
    """What may be said without hesitation."""
    return [terminal for terminal in choice.terminals if terminal not in (PAUSE, WAIT)]


@lru_cache(maxsize=1024)
def _follow(world: World, terminals: _Pieces) -> tuple[int, Choice]:
    """How many terminals are possible, of documents one after the other, and what may follow.

    Sums of all splits: those that the training text leaves out are as possible as others.
    """
    try:
        upcoming = replay(stream(world, split=None), terminals).upcoming
    except ImpossibleText as impossible:
        return _follow(world, terminals[: impossible.index])
    assert upcoming is not None  # a stream does not end
    return len(terminals), upcoming
