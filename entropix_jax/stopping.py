"""Stop strings: text is held back while it could still become one."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Tag = TypeVar("Tag")


class StopFilter(Generic[Tag]):
    """Lets tagged pieces of a text through up to the first stop string, never a part of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held: list[tuple[str, Tag]] = []
        self.stopped = False

    def push(self, text: str, tag: Tag) -> Iterator[tuple[str, Tag]]:
        """Takes a piece, and gives the pieces that are now certain to be printed."""
        if self.stopped:
            return
        self._held.append((text, tag))
        held = "".join(piece for piece, _ in self._held)
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        self.stopped = bool(found)
        yield from self._release(min(found) if found else len(held) - self._open(held))
        if self.stopped:
            self._held.clear()

    def flush(self) -> Iterator[tuple[str, Tag]]:
        """Gives what was held back: the text has ended and no stop string came of it."""
        yield from self._release(sum(len(piece) for piece, _ in self._held))

    def _open(self, text: str) -> int:
        """The length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, length: int) -> Iterator[tuple[str, Tag]]:
        while self._held and length > 0:
            text, tag = self._held.pop(0)
            if len(text) > length:
                self._held.insert(0, (text[length:], tag))
                text = text[:length]
            length -= len(text)
            if text:
                yield text, tag
