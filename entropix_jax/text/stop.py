"""Stop strings: text that may become one is held back."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Tag = TypeVar("Tag")


class StopFilter(Generic[Tag]):
    """Passes tagged pieces of a text through up to the first stop string, never a part of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held: list[tuple[str, Tag]] = []
        self.stopped = False

    def push(self, text: str, tag: Tag) -> Iterator[tuple[str, Tag]]:
        """Takes a piece and yields the pieces that no stop string can contain any more."""
        if self.stopped:
            return
        self._held.append((text, tag))
        held = "".join(piece for piece, _ in self._held)
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        self.stopped = bool(found)
        yield from self._release(min(found) if found else len(held) - self._open_length(held))
        if self.stopped:
            self._held.clear()

    def flush(self) -> Iterator[tuple[str, Tag]]:
        """Yields what was held back, at the end of the text."""
        yield from self._release(sum(len(piece) for piece, _ in self._held))

    def _open_length(self, text: str) -> int:
        """The length of the longest suffix of the text that is a prefix of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(s.startswith(text[-n:]) for s in self._stops)), 0)

    def _release(self, length: int) -> Iterator[tuple[str, Tag]]:
        while self._held and length > 0:
            text, tag = self._held.pop(0)
            if rest := text[length:]:
                self._held.insert(0, (rest, tag))
            if out := text[:length]:
                yield out, tag
            length -= len(text)
