"""`entropix-jax inspect`: prints the uncertainty of a given text."""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

from entropix_jax.cli import options
from entropix_jax.cli.status import plural, show_status
from entropix_jax.errors import UserError, check_range
from entropix_jax.names import MEANINGS, REGIMES

if TYPE_CHECKING:
    from entropix_jax.engine.score import ScoredToken

_COLUMNS = "entropy", "varentropy", "attn_entropy_norm", "agreement"
_TITLES = "position regime    logprob    entropy varentropy  attention  agreement"


@dataclass(frozen=True)
class Arguments:
    """Prints, token by token, how uncertain the model is about a given text.

    The tokens go to standard output; notes and a summary go to standard error.

    Example:
        --text "The capital of France is Paris."
    """

    text: options.Text = None
    """The text."""
    text_file: options.File = None
    """Read the text from a file, - for standard input, as --prompt-file of generate."""
    model: options.ModelOptions = field(default_factory=options.ModelOptions)
    context: options.Count = 0
    """Context length in tokens; 0: 1024, or the model's positions if fewer."""
    top: options.Count = 0
    """Record this many of the most likely tokens at each position (with --format json)."""
    layers: bool = False
    """Add the attention entropy of each layer and head to each token (with --format json)."""
    format: Literal["table", "text", "json"] = "table"
    """table: a line per token. text: the text coloured by regime. json: JSON Lines, all metrics."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    text = _read_text(arguments)
    with show_status("loading JAX"):
        from entropix_jax.engine.score import score_tokens
        from entropix_jax.engine.state import Recording
        from entropix_jax.engine.trace import header

    name, model, calibrated = arguments.model.start(arguments.model.choose_sampler())
    ids = model.tokenizer.encode(text, add_bos=True)
    scored = score_tokens(
        model,
        ids,
        calibrated,
        context=arguments.context or None,
        recording=Recording(top=arguments.top, layers=arguments.layers),
    )
    with show_status("compiling or loading the program, and reading the text"):
        first = [*islice(scored, 1)]  # of many that are computed at once
    sums: Counter[str] = Counter()
    tokens = _add_up(chain(first, scored), sums)
    if arguments.format == "json":
        options.print_json(header(model, calibrated, ids[:1], seed=None, name=name))
        for token in tokens:
            options.print_json(token.to_json())
    else:
        columns = _COLUMNS if calibrated.wrong_table is None else (*_COLUMNS, "p_wrong")
        _print_tokens(tokens, columns if arguments.format == "table" else ())
    count = sums["tokens"]
    means = {name: sums[name] / count for name in ("bits_per_token", "entropy", "varentropy")}
    if arguments.format == "json":
        regimes = {regime: sums[regime] for regime in REGIMES}
        options.print_json({"type": "footer", "tokens": count, **means, "regimes": regimes})
    shares = " ".join(f"{MEANINGS[regime]} {sums[regime] / count:.0%}" for regime in REGIMES)
    bits = f"{means['bits_per_token']:.3f} bits a token, {means['entropy']:.3f} expected"
    print(f"{plural(count, 'token')} | {bits} | {shares}", file=sys.stderr)
    return options.EXIT_OK


def _read_text(arguments: Arguments) -> str:
    if (arguments.text is None) == (arguments.text_file is None):
        raise UserError("give the text with --text or --text-file, and only one of them")
    check_range("--top", arguments.top, 0)
    check_range("--context", arguments.context, 0)
    if (arguments.top or arguments.layers) and arguments.format != "json":
        raise UserError("--top and --layers need --format json")
    text = arguments.text
    if arguments.text_file is not None:
        text = options.read_input(arguments.text_file, "--text")
    if not text:
        raise UserError("the text is empty")
    return text


def _add_up(tokens: "Iterator[ScoredToken]", sums: "Counter[str]") -> "Iterator[ScoredToken]":
    """Passes tokens through, and adds what the summary needs to `sums`."""
    for token in tokens:
        measured: dict[str, Any] = {"bits_per_token": -token.logprob / math.log(2.0)}
        measured |= {"entropy": token.entropy, "varentropy": token.varentropy}
        sums.update({"tokens": 1, token.regime: 1, **measured})
        yield token


def _print_tokens(tokens: "Iterator[ScoredToken]", columns: Sequence[str]) -> None:
    """Prints a line for each token with these columns, or without columns the coloured text."""
    from entropix_jax.cli.terminal import TextScreen, print_legend

    screen = TextScreen()
    if columns:
        print(_TITLES + "".join(f"{name:>11}" for name in columns[len(_COLUMNS) :]) + "  text")
    elif screen.coloured:
        print_legend()
    try:
        for token in tokens:
            if not columns:
                screen.show(token.text, token)
                continue
            regime = screen.paint(f"{token.regime:6}", token)
            values = " ".join(f"{getattr(token, name):10.4f}" for name in columns)
            print(f"{token.position:>8} {regime} {token.logprob:10.4f} {values}  {token.text!r}")
    finally:
        screen.end_text()
