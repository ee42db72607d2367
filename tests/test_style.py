"""Old habits of style, which no text of the project may contain, except for `LIMITS`.

`python -m tests.test_style` prints each place with the better wording, and the counts by folder.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXTS, CODE, PAGES = {".md"}, {".py"}, {".html", ".js", ".css"}
TOPS = {"docs": TEXTS, "scripts": CODE, "tests": CODE, "entropix_jax": CODE | PAGES}

# A pattern, and the better wording. Only wordings that plain technical English does without.
HABITS = {
    re.compile(pattern): better
    for pattern, better in {
        r"(?<=\w )likel(?:ier|iest)\b|\b[Ll]ikel(?:ier|iest)(?= \w)": "more or most likely",
        r"(?<=\w )surest\b|\b[Ss]urest(?= \w)": "most confident",
        r"(?:(?:^|[.:] )What|; what) (?:is|was|are|may|can|has|it|an?|the|of) [^?]*$": "name it",
        r"\b[Ww]h(?:oever|ichever of)\b": "name the noun",
        r"\bwhatever is in none\b": "everything else",
        r"\b[Ww]hat (?:came|becomes?) of\b": "result, new status",
        r"\bthat there (?:is|are)(?=[.,;:)])": "existing, available, or nothing",
        r"\bdecides? nothing\b": "has no effect; exploratory",
        r"\btells? (?:of|how|what|which|whether|nothing)\b": "reports, returns, states",
        r"\b(?:is|are|was|were) told\b(?! to\b)": "is reported, is returned",
        r"\bno \w+ (?:is|was) seen\b|\bseen to\b": "measured; significant",
        r"\b[Nn]obody (?:may|else|asks|has|can|guesses|knows)\b": "name who or what",
        r"\b(?:it|which|host|step|code|kernel|engine|scatter|device) wants\b": "requires, expects",
        r"\b(?:it|which|that|there) knows? (?:no|none|nothing)\b": "supports no, imports no",
        r"\bgo(?:es)? on(?=[.,;:)]| (?:with|from|as|until|after|while|where|alone)\b)": "continue",
        r"\bwent on\b(?! to\b)": "continued",
        r"\bcomes? to (?:its|their) ends?\b": "finishes",
        r"\btakes? no (?:others?|more|part)\b": "rejects new ones; is not used",
        r"\bstands? (?:for itself|each for|alone|side by side)\b": "is independent; is uncorrected",
        r"\bas it stands\b": "unchanged",
        r"\b(?<!there )(?:is|are|be|was|of) none\b(?! of)": "NaN, empty, missing?",
        r"\bso many (?:tokens|rows|slots|branches|steps|bytes|lanes)\b(?! that)": "N; at most N",
        r"\bso (?:likely|much of)\b": "at least this likely; the first N",
        r"\b[Aa]s many of the\b": "the top k, the longest prefix",
        r"\bbeside (?:it|them|its|their|others?|the (?!point))\b": "next to; compared with",
        r"\bhad no turn\b|\bin its turn\b": "timed out in the queue; when it is scheduled",
        r"^The (?:same|inverse|other way)(?:[,.]| with\b)": "say what it does",
        r"^(?:As|See|Of|Like) `[\w.]+`\.$": "say what it does",
        r"\bnot at hand\b|\bthat (?:is|are) not there\b": "unavailable, absent",
        r"\b(?:can|may|could) be had\b": "is available",
        r"\bby (?:the same|equal) effort\b": "with the same effort",
        r"\bin the mean\b": "on average",
    }.items()
}

# Correct uses: Jinja's own test "is none".
LIMITS = {"entropix_jax/report": 1, "tests/text": 1}


def strings_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and text of each comment and string constant of a Python file."""
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, line.strip()


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and text of the prose of a file, without code blocks of Markdown."""
    if path.suffix == ".py":
        yield from strings_of(path)
        return
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        is_code ^= line.startswith("```")
        if not (is_code and path.suffix in TEXTS):
            yield number, line.strip().lstrip("/* ")


def files() -> Iterator[tuple[str, Path]]:
    """Yields folder, as in `LIMITS`, and path of each file but this one, which has the patterns."""
    yield "README.md", ROOT / "README.md"
    for top, suffixes in TOPS.items():
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in suffixes and path != Path(__file__).resolve():
                inside = path.relative_to(ROOT).parts[:-1]
                yield "/".join(inside[:2]) if top in ("entropix_jax", "tests") else top, path


def found() -> Iterator[tuple[str, Path, int, str, str]]:
    """Yields the folder, file, line, words and better wording of each habit."""
    for folder, path in files():
        for number, line in lines_of(path):
            for pattern, better in HABITS.items():
                for match in pattern.finditer(line):
                    yield folder, path.relative_to(ROOT), number, match[0], better


def test_old_habits() -> None:
    places = [*found()]
    for folder, count in Counter(folder for folder, *_ in places).items():
        shown = [f"{p}:{n}: {w!r}: {b}" for f, p, n, w, b in places if f == folder]
        assert count <= LIMITS.get(folder, 0), "\n".join(shown)


if __name__ == "__main__":
    seen = [*found()]
    for _, path, number, words, better in seen:
        print(f"{path}:{number}: {words!r}: {better}")
    for folder, count in sorted(Counter(folder for folder, *_ in seen).items()):
        print(f"{count:5} of {LIMITS.get(folder, 0):5}  {folder}")
