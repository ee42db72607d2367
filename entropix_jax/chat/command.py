"""`entropix-jax chat`: a conversation in the terminal."""

from dataclasses import dataclass, field
from typing import Any

from entropix_jax.cli.options import (
    Count,
    File,
    Highlight,
    ModelOptions,
    OptionalCount,
    Source,
    Text,
    Texts,
    choose_context,
    open_source,
    read_messages,
)
from entropix_jax.cli.status import show_status
from entropix_jax.errors import UserError, check_range

_MAX_CONTEXT = 4096  # by default


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
    """Maximum number of tokens in an answer."""
    seed: Count = 0
    """Seed of all random numbers. /retry uses the next one for its answer."""
    system: Text = None
    """A system message."""
    stop: Texts = ()
    """Stop strings. They end an answer and are removed from it."""
    messages: File = None
    """Continue a conversation from a JSON file that /save wrote: a list of {"role": ...,
    "content": ...}."""
    context: OptionalCount = None
    """Maximum tokens in the conversation (default: the model's positions, at most 4096)."""
    lookup: Source = None
    """Source of the arm lookup: FILE.csv, FILE.jsonl, a URL or exec:PATH; see generate."""
    highlight: Highlight = "regimes"
    """Colour each token by its regime, or only forks and steps back."""
    quiet: bool = False
    """Do not print statistics after each answer."""
    ask: bool = False
    """On a terminal, ask which branch to take if the two best scores are within the margin."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    # A mistake in these should not wait for JAX, or the model.
    check_range("--max-new-tokens", arguments.max_new_tokens, 1)
    check_range("--context", arguments.context, 2)
    if not all(arguments.stop):
        raise UserError("--stop: stop strings must not be empty")
    if arguments.messages is not None and arguments.system is not None:
        raise UserError("--system cannot be used with --messages: put it into the messages")
    with show_status("loading JAX"):
        from entropix_jax.chat.session import Session
        from entropix_jax.engine.request import Request
        from entropix_jax.text.chat_template import plain_messages

    sampler = arguments.model.choose_sampler()
    lookup = open_source(arguments.lookup, sampler)
    messages: Any = []
    if arguments.messages is not None:
        raw = read_messages(arguments.messages)
        try:
            messages = plain_messages(raw)
        except UserError as error:
            raise UserError(f"{arguments.messages}: {error}") from None
    elif arguments.system is not None:
        messages = [{"role": "system", "content": arguments.system}]

    name, model, calibrated = arguments.model.start(sampler)
    request = Request(
        (),
        calibrated,
        max_new_tokens=arguments.max_new_tokens,
        seed=arguments.seed,
        eos_ids=model.end_ids(chat=True),
        stop=arguments.stop,
        lookup=lookup,
    )
    context = choose_context(arguments.context, model.config, _MAX_CONTEXT)
    shown = arguments.quiet, arguments.highlight == "actions", arguments.ask
    return Session(model, name, arguments.model, request, context, messages, *shown).run()
