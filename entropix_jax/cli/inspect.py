"""`python -m entropix_jax.inspect`: the uncertainty of a given text, nothing generated."""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from entropix_jax.cli.options import (
    EXIT_OK,
    Count,
    File,
    Flag,
    ModelOptions,
    Text,
    model_name,
    parse,
    print_json,
    read_input,
    run_command,
)
from entropix_jax.errors import UserError, check_range
from entropix_jax.names import MEANINGS, REGIMES

if TYPE_CHECKING:
    from entropix_jax.engine.score import ScoredToken

_Measured = tuple[str, float, float, float]  # regime, bits, entropy, varentropy
_COLUMNS = {
    "entropy": "entropy",
    "varentropy": "varentropy",
    "attn_entropy_norm": "attention",
    "agreement": "agreement",
}


@dataclass(frozen=True)
class Arguments:
    """Prints, token by token, how uncertain the model is about a given text.

    The tokens go to standard output; notes and a summary go to standard error.

    Example:
        --text "The capital of France is Paris."
    """

    text: Text = None
    """The text."""
    text_file: File = None
    """Read the text from a file, - for standard input."""
    model: ModelOptions = field(default_factory=ModelOptions)
    context: Count = 0
    """Context length in tokens; 0: 1024, or the model's positions."""
    top: Count = 0
    """Record this many of the most likely tokens at each position (with --format json)."""
    layers: Flag = False
    """Add the attention entropy of each layer and head to each token (with --format json)."""
    format: Literal["table", "text", "json"] = "table"
    """A line for each token, the text coloured by regime, or JSON Lines with all metrics."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m entropix_jax.inspect") -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: _main(parse(Arguments, argv, prog, "--text")))


def _main(arguments: Arguments) -> int:
    text = _read_text(arguments)
    from entropix_jax.engine.preparation import calibrate_sampler
    from entropix_jax.engine.score import score_tokens
    from entropix_jax.engine.state import Recording
    from entropix_jax.engine.trace import header
    from entropix_jax.host.compile_cache import use_compilation_cache

    sampler = arguments.model.choose_sampler()
    use_compilation_cache()
    name = model_name(arguments.model.model)
    check = arguments.model.check
    model = arguments.model.load(name)
    calibrated = calibrate_sampler(sampler, model)
    ids = model.tokenizer.encode(text, add_bos=True)
    scored = score_tokens(
        model,
        ids,
        calibrated,
        context=arguments.context or None,
        recording=Recording(top=arguments.top, layers=arguments.layers, check=check),
    )
    for note in calibrated.notes:
        print(f"note: {note}", file=sys.stderr)
    seen: list[_Measured] = []
    tokens = _note(scored, seen)
    if arguments.format == "json":
        print_json(header(model, calibrated, ids[:1], seed=None, name=name))
        for token in tokens:
            print_json(token.to_json())
        print_json({"type": "footer", **_summarize(seen)})
    else:
        _print_tokens(tokens, table=arguments.format == "table")
    values = _summarize(seen)
    noun = "token" if len(seen) == 1 else "tokens"
    shares = " ".join(f"{MEANINGS[r]} {n / len(seen):.0%}" for r, n in values["regimes"].items())
    print(
        f"{len(seen)} {noun} | {values['bits_per_token']:.3f} bits a token, "
        f"{values['entropy']:.3f} expected | {shares}",
        file=sys.stderr,
    )
    return EXIT_OK


def _read_text(arguments: Arguments) -> str:
    if (arguments.text is None) == (arguments.text_file is None):
        raise UserError("give the text with --text or --text-file, and only one of them")
    check_range("--top", arguments.top, 0)
    check_range("--context", arguments.context, 0)
    if (arguments.top or arguments.layers) and arguments.format != "json":
        raise UserError("--top and --layers need --format json")
    text = arguments.text
    if arguments.text_file is not None:
        text = read_input(arguments.text_file, "--text")
    if not text:
        raise UserError("the text is empty")
    return text


def _note(tokens: "Iterator[ScoredToken]", seen: list[_Measured]) -> "Iterator[ScoredToken]":
    """Passes tokens through, and adds what the summary needs to `seen`."""
    for token in tokens:
        bits = -token.logprob / math.log(2.0)
        seen.append((token.regime, bits, token.entropy, token.varentropy))
        yield token


def _summarize(seen: Sequence[_Measured]) -> dict[str, Any]:
    """The means over all tokens, and how many are in each regime."""
    regimes, *columns = zip(*seen, strict=True)
    counts = Counter(regimes)
    means = (sum(column) / len(seen) for column in columns)
    return {
        "tokens": len(seen),
        **dict(zip(("bits_per_token", "entropy", "varentropy"), means, strict=True)),
        "regimes": {regime: counts[regime] for regime in REGIMES},
    }


def _print_tokens(tokens: "Iterator[ScoredToken]", *, table: bool) -> None:
    from entropix_jax.cli.terminal import TextScreen, print_legend

    screen = TextScreen()
    if table:
        heads = " ".join(f"{head:>10}" for head in _COLUMNS.values())
        print(f"{'position':>8} regime    logprob {heads}  text")
    elif screen.coloured:
        print_legend()
    try:
        for token in tokens:
            if not table:
                screen.show(token.text, token)
                continue
            regime = screen.paint(f"{token.regime:6}", token)
            values = " ".join(f"{getattr(token, name):10.4f}" for name in _COLUMNS)
            print(f"{token.position:>8} {regime} {token.logprob:10.4f} {values}  {token.text!r}")
    finally:
        screen.end_text()
