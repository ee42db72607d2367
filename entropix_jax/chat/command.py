"""`python -m entropix_jax.chat`: a conversation in the terminal."""

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entropix_jax.cli.options import (
    Count,
    File,
    Flag,
    ModelOptions,
    OptionalCount,
    Text,
    Texts,
    model_name,
    own_mechanisms,
    parse,
    run_command,
)
from entropix_jax.cli.status import is_terminal, show_status
from entropix_jax.errors import UserError, check_range
from entropix_jax.host.files import read_text

_MAX_CONTEXT = 4096  # unless another number is asked for
_TOP = 5  # likeliest tokens that a saved page shows


@dataclass(frozen=True)
class Arguments:
    """Chats with a model in the terminal. Answers are coloured by regime, with statistics below.

    The cache is kept between turns, so each turn prefills only new tokens. /help lists the
    commands. If standard input is not a terminal, each of its lines is a turn. Answers go to
    standard output, everything else to standard error.

    Example:
        --model smollm2 --system "Answer in one sentence."
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    max_new_tokens: Count = 512
    """Maximum number of tokens of an answer."""
    seed: Count = 0
    """Seed of all random numbers. /retry takes the next one for its answer."""
    system: Text = None
    """A system message."""
    stop: Texts = ()
    """Stop strings: texts that end an answer and are removed from it."""
    messages: File = None
    """Continue a conversation from a JSON file that /save wrote: a list of {"role": ...,
    "content": ...}."""
    context: OptionalCount = None
    """Maximum tokens of the conversation (default: the model's positions, at most 4096)."""
    quiet: Flag = False
    """Do not print statistics after each answer."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m entropix_jax.chat") -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: _main(parse(Arguments, argv, prog)))


def _main(arguments: Arguments) -> int:
    # A mistake in these should not wait for JAX, or the model.
    check_range("--max-new-tokens", arguments.max_new_tokens, 1)
    check_range("--context", arguments.context, 2)
    stop = [*itertools.chain(*arguments.stop)]
    if not all(stop):
        raise UserError("--stop: stop strings must not be empty")
    if arguments.messages is not None and arguments.system is not None:
        raise UserError("--messages holds its own system message: it does not go with --system")
    from entropix_jax.chat.dialogue import Dialogue, Turn, turns_of
    from entropix_jax.chat.session import Session
    from entropix_jax.engine.preparation import calibrate_sampler
    from entropix_jax.engine.state import Recording
    from entropix_jax.host.compile_cache import use_compilation_cache

    sampler = arguments.model.choose_sampler()
    system = arguments.system
    turns: list[Turn] = []
    question = None
    if arguments.messages is not None:
        path = Path(arguments.messages)
        system, turns, question = turns_of(_read_messages(path), path, arguments.seed)

    use_compilation_cache()
    name = model_name(arguments.model.model)
    check = arguments.model.check
    with show_status("loading the model ..."):
        model = arguments.model.load(name)
        calibrated = calibrate_sampler(sampler, model)
    positions = model.config.max_positions
    if arguments.context is not None and arguments.context > positions:
        raise UserError(f"--context {arguments.context}: the model has {positions} positions")
    dialogue = Dialogue(
        model,
        calibrated,
        context=arguments.context or min(positions, _MAX_CONTEXT),
        system=system,
        seed=arguments.seed,
        max_new_tokens=arguments.max_new_tokens,
        stop=stop,
        recording=Recording(top=_TOP, layers=True, check=check),
    )
    dialogue.turns = turns
    for note in calibrated.notes:
        print(f"note: {note}", file=sys.stderr)
    session = Session(
        dialogue,
        sampler,
        [*itertools.chain(*arguments.model.set)],
        own=own_mechanisms(arguments.model.plugin),
        name=name,
        quiet=arguments.quiet,
    )
    if is_terminal(sys.stdin):
        session.greet()
    return session.run(question)


def _read_messages(path: Path) -> object:
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
