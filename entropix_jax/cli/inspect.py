"""`python -m entropix_jax.inspect`: the uncertainty of a given text, nothing generated."""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from entropix_jax.cli.options import (
    EXIT_OK,
    Count,
    Dtype,
    File,
    Flag,
    Model,
    Text,
    Texts,
    flat_settings,
    model_name,
    parse,
    read_input,
    run_command,
)
from entropix_jax.errors import UserError, check_range
from entropix_jax.names import REGIMES

if TYPE_CHECKING:
    from entropix_jax.engine.score import ScoredToken

_COLUMNS = (
    ("entropy", "entropy"),
    ("varentropy", "varentropy"),
    ("attn_entropy_norm", "attention"),
    ("agreement", "agreement"),
)


@dataclass(frozen=True)
class Arguments:
    """Prints, token by token, how uncertain the model is about a given text.

    The tokens go to standard output; notes and a summary go to standard error.
    """

    text: Text = None
    """The text."""
    text_file: File = None
    """Read the text from a file, - for standard input."""
    model: Model = None
    """smollm2, tiny, a folder in the Hugging Face layout, a GGUF file, or a hub id owner/name
    (default: smollm2 where its package is installed, else tiny)."""
    sampler: Annotated[str, tyro.conf.arg(metavar="PRESET_OR_FILE")] = "entropix"
    """The preset, or sampler file that ends in .toml, that assigns the regimes."""
    set: Annotated[Texts, tyro.conf.arg(metavar="sampler.KEY=VALUE ...")] = ()
    """Change settings of the sampler."""
    context: Count = 0
    """Most tokens that the model sees at once; 0: 1024, or as many as it has positions."""
    top: Count = 0
    """Add this many of the likeliest tokens to each token (with --format json)."""
    layers: Flag = False
    """Add the attention entropy of each layer and head to each token (with --format json)."""
    dtype: Dtype = None
    """Type of the weights in memory (default: as in the checkpoint)."""
    check: Flag = False
    """Look for NaN and infinity in all weights and activations: an error then names the tensor, or
    the layer and the position."""
    format: Literal["table", "text", "json"] = "table"
    """A line for each token, the text coloured by regime, or JSON Lines with all metrics."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m entropix_jax.inspect") -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: _main(parse(Arguments, argv, prog)))


def _main(arguments: Arguments) -> int:
    text = _read_text(arguments)
    from entropix_jax.engine.calibrated import calibrate_sampler
    from entropix_jax.engine.score import score_tokens
    from entropix_jax.engine.state import Recording
    from entropix_jax.engine.trace import header
    from entropix_jax.host.compile_cache import use_compilation_cache
    from entropix_jax.model.loading import load
    from entropix_jax.sampler.presets import choose_sampler

    sampler = choose_sampler(arguments.sampler, flat_settings(arguments.set))
    use_compilation_cache()
    name = model_name(arguments.model)
    model = load(name, arguments.dtype, check=arguments.check)
    calibrated = calibrate_sampler(sampler, model)
    tokens = model.tokenizer.encode(text, add_bos=True)
    scored = score_tokens(
        model,
        tokens,
        calibrated,
        context=arguments.context or None,
        recording=Recording(top=arguments.top, layers=arguments.layers, check=arguments.check),
    )
    for note in calibrated.notes:
        print(f"note: {note}", file=sys.stderr)
    tally = _Tally(scored)
    if arguments.format == "json":
        _print_json([header(model, calibrated, tokens[:1], seed=None, name=name)])
        _print_json(token.to_json() for token in tally)
        _print_json([{"type": "footer", **tally.to_json()}])
    elif arguments.format == "text":
        _print_text(tally)
    else:
        _print_table(tally)
    print(tally.summary(), file=sys.stderr)
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


class _Tally:
    """Passes tokens through, and keeps what the summary needs."""

    def __init__(self, tokens: "Iterator[ScoredToken]") -> None:
        self._tokens = tokens
        self._regimes: Counter[str] = Counter()
        self._nats = self._entropy = self._varentropy = 0.0

    def __iter__(self) -> "Iterator[ScoredToken]":
        for token in self._tokens:
            self._regimes[token.regime] += 1
            self._nats -= token.logprob
            self._entropy += token.entropy
            self._varentropy += token.varentropy
            yield token

    def to_json(self) -> dict[str, Any]:
        count = max(self._regimes.total(), 1)
        return {
            "tokens": self._regimes.total(),
            "bits_per_token": self._nats / count / math.log(2.0),
            "entropy": self._entropy / count,
            "varentropy": self._varentropy / count,
            "regimes": {regime: self._regimes[regime] for regime in REGIMES},
        }

    def summary(self) -> str:
        """Tokens, what the text cost against what the model expected it to, and the regimes."""
        values = self.to_json()
        number, noun = values["tokens"], "token" if values["tokens"] == 1 else "tokens"
        shares = " ".join(f"{r} {n / max(number, 1):.0%}" for r, n in values["regimes"].items())
        return (
            f"{number} {noun} | {values['bits_per_token']:.3f} bits a token, "
            f"{values['entropy']:.3f} expected | {shares}"
        )


def _print_json(objects: Any) -> None:
    # Where the encoding lacks a character, its escape still means it.
    escape = (sys.stdout.encoding or "").lower() != "utf-8"
    for one in objects:
        print(json.dumps(one, ensure_ascii=escape, allow_nan=False))


def _print_text(tokens: "_Tally") -> None:
    from entropix_jax.cli.terminal import TextScreen, print_legend

    screen = TextScreen()
    if screen.coloured:
        print_legend()
    try:
        for token in tokens:
            screen.show(token.text, token)
    finally:
        screen.end_text()


def _print_table(tokens: "_Tally") -> None:
    from entropix_jax.cli.terminal import TextScreen

    screen = TextScreen()
    heads = " ".join(f"{head:>10}" for _, head in _COLUMNS)
    print(f"{'position':>8} regime    logprob {heads}  text")
    for token in tokens:
        values = " ".join(f"{getattr(token, name):10.4f}" for name, _ in _COLUMNS)
        regime = screen.paint(f"{token.regime:6}", token)
        print(f"{token.position:>8} {regime} {token.logprob:10.4f} {values}  {token.text!r}")
