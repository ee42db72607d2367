"""A terminal in small, as strict as they come: what is on its screen after some bytes.

It forgets where a full line goes on once the cursor was moved or saved, as tmux does, and knows no
escape sequence but those that every terminal of the last decades does.
"""

from __future__ import annotations

import re

from rich.cells import cell_len

_ESCAPE = re.compile(r"\x1b(?:\[([0-9;]*)([A-Za-z])|([78D]))")


class Glass:
    """Rows of cells; what has left it at the top is kept."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._gone: list[tuple[str, bool]] = []
        self._rows = [[" "] * width for _ in range(height)]
        self._wrapped = [False] * height  # whether the row goes on in the next one
        self._row = self._column = 0  # the column is the width where the row is full
        self._saved = (0, 0)

    def feed(self, written: str) -> None:
        at = 0
        while at < len(written):
            if written[at] != "\x1b":
                self._put(written[at])
                at += 1
                continue
            match = _ESCAPE.match(written, at)
            assert match, f"no such escape sequence: {written[at : at + 12]!r}"
            self._steer(match[1], match[2] or match[3])
            at = match.end()

    @property
    def text(self) -> str:
        """All lines, those that were wrapped made whole, without the spaces at their ends."""
        shown = [("".join(r), w) for r, w in zip(self._rows, self._wrapped, strict=True)]
        joined = "".join(
            row if wrapped else row.rstrip() + "\n" for row, wrapped in self._gone + shown
        )
        return joined.rstrip("\n") + "\n"

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._down()
        elif character == "\t":
            self._column = min((self._column // 8 + 1) * 8, self.width - 1)
        else:
            size = cell_len(character)
            assert character.isprintable(), repr(character)
            if self._column + size > self.width:
                self._wrapped[self._row] = True
                self._down()
                self._column = 0
            cells = [character] + [""] * (size - 1)
            self._rows[self._row][self._column : self._column + size] = cells
            self._column += size

    def _down(self) -> None:
        if self._row < self.height - 1:
            self._row += 1
            return
        self._gone.append(("".join(self._rows.pop(0)), self._wrapped.pop(0)))
        self._rows.append([" "] * self.width)
        self._wrapped.append(False)

    def _steer(self, numbers: str, letter: str) -> None:
        if letter == "m":
            return
        full = self._column == self.width
        self._column = min(self._column, self.width - 1)
        if letter == "7":
            self._saved = self._row, self._column
        elif letter == "8":
            self._row, self._column = self._saved
        elif letter == "D":
            self._down()
        elif letter == "A":
            self._row = max(self._row - int(numbers or 1), 0)
        elif letter == "B":
            self._row = min(self._row + int(numbers or 1), self.height - 1)
        elif letter == "J":
            assert not numbers
            self._rows[self._row][self._column :] = [" "] * (self.width - self._column)
            self._wrapped[self._row] = False
            for row in range(self._row + 1, self.height):
                self._rows[row], self._wrapped[row] = [" "] * self.width, False
        else:
            raise AssertionError(f"no such escape sequence: {letter}")
        assert not (full and letter in "78DJ"), "where it goes on was lost"
