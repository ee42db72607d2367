"""Shared by all commands: argument parsing, exit statuses, and errors of one line."""

import argparse
import contextlib
import difflib
import errno
import gc
import inspect
import io
import json
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args, get_type_hints

import docstring_parser

from entropix_jax.cli.status import show_status
from entropix_jax.errors import Note, UserError, check_range, printable
from entropix_jax.host.cluster import ANY
from entropix_jax.host.files import decode_json, decode_text, read_text
from entropix_jax.host.heap import GC_THRESHOLD
from entropix_jax.host.interrupts import EXIT_INTERRUPT
from entropix_jax.host.lookup import Lookup, open_lookup
from entropix_jax.model import find
from entropix_jax.names import SERVED
from entropix_jax.sampler.files import check_names

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from entropix_jax.engine.calibrated import CalibratedSampler
    from entropix_jax.model.config import ModelConfig
    from entropix_jax.model.loading import LanguageModel
    from entropix_jax.sampler.sampler import Sampler

EXIT_OK, EXIT_USAGE = 0, 2
_EXAMPLE = "\n\nExample:\n"  # begins the last paragraph of a command's docstring: its options
_WIDEST_HELP = 100
_MAX_CONTEXT = 2048  # cache positions of a row of many, by default
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

# Types of options, for the fields of a command's arguments. Their metadata are arguments of
# `add_argument`, or the placeholder of the value.
Text = Annotated[str | None, "TEXT"]
File = Annotated[str | None, "FILE"]
Folder = Annotated[str | None, "DIR"]
Source = Annotated[str | None, "SOURCE"]
Model = Annotated[str | None, "MODEL"]
Module = Annotated[str | None, "MODULE"]
RayAddress = Annotated[str | None, {"metavar": "HOST:PORT", "nargs": "?", "const": ANY}]
Dtype = Annotated[Literal["bfloat16", "float32", "int8"] | None, {"aliases": ["--weights"]}]
Activations = Literal["auto", "float32", "bfloat16"]
Count = Annotated[int, "N"]
OptionalCount = Annotated[int | None, "N"]
Number = Annotated[float | None, "X"]
Texts = Annotated[Sequence[str], "TEXT"]
Positional = Annotated[str, {"positional": True}]
_BASE = ("temperature", "top_p", "top_k", "min_p")  # keys of `base` with options of their own


@dataclass(frozen=True)
class ModelOptions:
    """The model and its sampler."""

    model: Model = None
    """smollm2, tiny, asking, a folder in the Hugging Face layout, a GGUF file, or a hub id
    owner/name (default: smollm2 if its package is installed, else tiny)."""
    sampler: Annotated[str, "PRESET_OR_FILE"] = "entropix"
    """A preset (entropix, greedy, temperature, top-p, min-p, ...; an unknown name lists them all),
    or a sampler file that ends in .toml."""
    set: Annotated[Texts, "sampler.KEY=VALUE"] = ()
    """Change settings of the sampler."""
    temperature: Number = None
    """The same as --set sampler.base.temperature=X, from which the arms start; likewise the next
    three."""
    top_p: Number = None
    """Draw from the most likely tokens that make up this probability."""
    top_k: OptionalCount = None
    """Draw from this many of the most likely tokens."""
    min_p: Number = None
    """Draw from tokens at least this likely, relative to the most likely one."""
    plugin: Module = None
    """Python module whose MECHANISMS the sampler may use: your own arms, rules and transforms. The
    module is imported, so its code runs."""
    dtype: Dtype = None
    """Dtype of the weights in memory (default: the checkpoint's)."""
    precision: Activations = "auto"
    """Dtype of hidden states and, except on a CPU, of the cache. auto: that of the weights, on a
    CPU only if it multiplies bfloat16, else float32. With float32 a row's tokens rarely depend on
    its batch."""
    check: bool = False
    """Check all weights for NaN and infinity. An error names the tensor."""

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings of --set, after those of --temperature, --top-p, --top-k and --min-p."""
        base = ((name, getattr(self, name)) for name in _BASE)
        short = (f"sampler.base.{name}={value}" for name, value in base if value is not None)
        return (*short, *self.set)

    def with_settings(self, *settings: str) -> "ModelOptions":
        """Returns options with these settings of the sampler and no others."""
        base: dict[str, Any] = dict.fromkeys(_BASE)
        return replace(self, set=settings, **base)

    def check_names(self) -> None:
        """Raises UserError for an unknown model, preset or setting. Imports no JAX."""
        find.find_model(self.model)
        check_names(self.sampler, self.settings if self.plugin is None else ())

    def fit(self, name: str, context: int | None, *, slots: int, mesh: "Mesh | None" = None) -> int:
        """Returns the cache positions of a row for `--context`, by default at most 2048, and prints
        how much memory `slots` rows take. UserError if they do not fit into memory or onto the
        mesh, or the model has fewer positions."""
        from entropix_jax.engine.memory import check_memory
        from entropix_jax.model import loading
        from entropix_jax.model.mesh import check_mesh
        from entropix_jax.model.precision import choose_precision

        loading.check_backend()
        files = loading.open_model(loading.resolve_model(name))
        config = files.config
        capacity = choose_context(context, config, _MAX_CONTEXT)
        if mesh is not None:
            check_mesh(mesh, config, slots)
        weights = loading.weights_dtype(files, self.dtype)
        dtypes = choose_precision(weights, activations=self.precision)
        needs = check_memory(config, dtypes, slots=slots, capacity=capacity, mesh=mesh)
        print(needs, file=sys.stderr)
        return capacity

    def load(self, name: str, mesh: "Mesh | None" = None) -> "LanguageModel":
        """Loads the model of a name. Its programs are kept in the user's cache folder."""
        with show_status("loading the model"):
            from entropix_jax.host.compile_cache import use_compilation_cache
            from entropix_jax.model.loading import load

            use_compilation_cache()
            return load(name, self.dtype, mesh, precision=self.precision, check=self.check)

    def start(
        self, sampler: "Sampler", *, has_user: bool = True
    ) -> "tuple[str, LanguageModel, CalibratedSampler]":
        """Loads the model. Returns its name, it, and the sampler for it, whose notes it prints."""
        from entropix_jax.engine.calibrated import calibrate_sampler

        name = model_name(self.model)
        model = self.load(name)
        calibrated = calibrate_sampler(sampler, model)
        for note in calibrated.notes if has_user else calibrated.notes_without_user:
            print(f"note: {note}", file=sys.stderr)
        return name, model, calibrated

    def choose_sampler(self) -> "Sampler":
        """The sampler with its changed settings; UserError if one is wrong."""
        from entropix_jax.sampler.presets import choose_sampler, import_mechanisms

        return choose_sampler(self.sampler, self.settings, import_mechanisms(self.plugin))


Highlight = Literal["regimes", "actions"]


@dataclass(frozen=True)
class TextOptions:
    """Options of the generated text."""

    max_new_tokens: Count = 256
    """Maximum number of tokens to generate."""
    seed: Count = 0
    """Seed of all random numbers."""
    chat: bool = False
    """Send the prompt as a user message in a chat (default for Instruct models)."""
    no_chat: bool = False
    """Continue the prompt as plain text (default for other models)."""
    system: Text = None
    """A system message for the chat."""
    stop: Texts = ()
    """Stop strings. They end the text and are removed from it."""
    ignore_eos: bool = False
    """Continue past end tokens."""
    escape_special: bool = False
    """Encode control tokens such as <|im_end|> in the prompt as ordinary text, so that it cannot
    end a turn."""

    def check(self) -> None:
        """Raises UserError for invalid values."""
        if self.chat and self.no_chat:
            raise UserError("give only one of --chat and --no-chat")
        check_range("--max-new-tokens", self.max_new_tokens, 1)
        if not all(self.stop):
            raise UserError("--stop: stop strings must not be empty")

    def values(self) -> dict[str, Any]:
        """The options as arguments of `stream`, and of a batch's `Defaults`."""
        values = dict(vars(self))
        is_plain = values.pop("no_chat")
        chat = True if self.chat else False if is_plain else None
        return {**values, "chat": chat, "stop": [*self.stop]}


def open_source(source: str | None, sampler: "Sampler") -> Lookup | None:
    """Opens the source of --lookup. Prints a note if no regime uses it, or if it is missing."""
    looks_up = "lookup" in {sampler.written[f"arms.{name}"] for name in SERVED}
    if looks_up and source is None:
        print("note: the sampler's arm lookup only samples without --lookup", file=sys.stderr)
    if source is not None and not looks_up:
        print("note: --lookup: not used: no regime has the arm lookup", file=sys.stderr)
    return None if source is None else open_lookup(source)


def check_cluster(ray: str | None, cpus_per_actor: int | None) -> None:
    """Checks the options of a cluster by themselves."""
    check_range("--cpus-per-actor", cpus_per_actor, 1)
    if cpus_per_actor is not None and ray is None:
        raise UserError("--cpus-per-actor needs --ray")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def _get_values(self, action: Any, values: list[str]) -> Any:
        # Python 3.11 drops a value "--".
        return "--" if values == ["--"] else super()._get_values(action, values)


def parse(arguments: Any, argv: Sequence[str], prog: str) -> Any:
    """The command line as an instance of the dataclass `arguments`. `--help` prints and exits.
    UserError if options are unknown, missing or malformed."""
    width = min(shutil.get_terminal_size().columns, _WIDEST_HELP)
    text, _, example = inspect.cleandoc(arguments.__doc__ or "").partition(_EXAMPLE)
    paragraphs = [textwrap.fill(part, width, break_on_hyphens=False) for part in text.split("\n\n")]
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [OPTIONS]",
        description="\n\n".join([*paragraphs, f"example:\n  {prog} {example.strip()}"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    names = _add_options(parser, arguments)
    written = {f"--{name[2:].replace('-', '_')}": name for name in names}  # as other programs do
    found, unknown = parser.parse_known_args([written.get(one, one) for one in argv])
    if unknown and not unknown[0].startswith("-"):
        hint = "".join(f": give a text as {o} TEXT" for o in ("--prompt", "--text") if o in names)
        raise UserError(f"unexpected argument '{unknown[0]}'{hint} (see {prog} --help)")
    if unknown:
        close = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.7)
        hint = f", did you mean {close[0]}?" if close else ""
        raise UserError(f"unknown options: {' '.join(unknown)}{hint} (see {prog} --help)")
    parsed = _build(arguments, vars(found))
    for part in vars(parsed).values():
        if isinstance(part, ModelOptions):
            part.check_names()
    return parsed


def _add_options(parser: Any, kind: Any) -> list[str]:
    """Adds the fields of a dataclass to a parser, with their docstrings, and those of dataclasses
    in it as groups. Returns the names of the options."""
    owners = filter(is_dataclass, kind.__mro__)
    documented = (one for o in owners for one in docstring_parser.parse_from_object(o).params)
    texts = {one.arg_name: " ".join((one.description or "").split()) for one in documented}
    hints, names = get_type_hints(kind, include_extras=True), list[str]()
    for one in fields(kind):
        hint = hints[one.name]
        if is_dataclass(hint):
            group = parser.add_argument_group(inspect.cleandoc(hint.__doc__ or "").rstrip("."))
            names += _add_options(group, hint)
            continue
        settings: dict[str, Any] = {"help": texts[one.name].replace("%", "%%")}
        for mark in getattr(hint, "__metadata__", ()):
            settings |= {"metavar": mark} if isinstance(mark, str) else mark
        hint = hint.__origin__ if hasattr(hint, "__metadata__") else hint
        hint = get_args(hint)[0] if type(None) in get_args(hint) else hint  # X | None
        if hint is bool:
            settings["action"] = "store_true"
        elif getattr(hint, "__origin__", None) is Sequence:
            settings |= {"action": "extend", "nargs": "+"}
        else:
            settings |= {"choices": get_args(hint)} if get_args(hint) else {"type": hint}
        if hint is not bool and one.default not in (None, (), "", MISSING):
            settings["help"] += f" (default: {one.default})"
        own = [f"--{one.name.replace('_', '-')}", *settings.pop("aliases", ())]
        if settings.pop("positional", False):
            own = [one.name]
        elif one.default is MISSING:
            settings["required"] = True
        parser.add_argument(*own, **settings)
        names += own
    return names


def _build(kind: Any, values: dict[str, Any]) -> Any:
    """Returns a dataclass, and those in it, with the values that were given."""
    makers = {one.name: one.default_factory for one in fields(kind)}
    parts = {n: _build(make, values) for n, make in makers.items() if is_dataclass(make)}
    return kind(**{n: values[n] for n in makers.keys() & values.keys()} | parts)


def run_command(command: Callable[[], int]) -> int:
    """Runs a command; errors become one line on standard error.

    Returns the exit status: 0 for success, 2 for an error that the user can correct, 130 for an
    interrupt. A reader that closes standard output early (`| head`) ends the command quietly, with
    0.
    """
    _repair_streams()
    gc.set_threshold(GC_THRESHOLD)
    try:
        try:
            with _print_notes():
                status = command()
        except SystemExit as exit_:  # of --help, or with a message, of a library
            if isinstance(exit_.code, str):
                raise UserError(exit_.code) from None
            status = exit_.code or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        message = str(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    except BrokenPipeError:
        return EXIT_OK
    except OSError as error:
        message = _describe(error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = "not enough memory: fewer rows, fewer new tokens or a smaller model need less"
    with contextlib.suppress(OSError):  # standard error on a full disk
        print(f"error: {printable(message)}", file=sys.stderr)
    return EXIT_USAGE


def model_name(name: str | None) -> str:
    """The model that a command uses: `name`, else the default one, with a line on standard error
    that says which."""
    if name is not None:
        return name
    name = find.default_model()
    other = "--model names another" if name != find.TINY else "a tiny one of an invented world"
    print(f"model: {name} ({other})", file=sys.stderr)
    return name


@contextlib.contextmanager
def _print_notes() -> Iterator[None]:
    """Prints each `Note` once, as a line of its own; other warnings stay as they are."""
    shown: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", Note)
        show = warnings.showwarning

        def print_note(
            message: Warning | str, category: type[Warning], *rest: Any, **named: Any
        ) -> None:
            text = str(message)
            if not issubclass(category, Note):
                show(message, category, *rest, **named)
            elif text not in shown:  # a file may be read again
                shown.add(text)
                with contextlib.suppress(OSError):  # standard error on a full disk
                    print(f"note: {printable(text)}", file=sys.stderr)

        warnings.showwarning = print_note
        yield


def _describe(error: OSError) -> str:
    """What went wrong, and where, as far as the error says."""
    reason = error.strerror or str(error) or type(error).__name__
    where = error.filename
    if where is None and error.errno in _OF_OUTPUT:  # standard output has no name
        where = "the output cannot be written"
    return reason if where is None else f"{where}: {reason}"


def read_input(name: str, instead: str) -> str:
    """Returns the text of a file, or of standard input where the name is `-`, without a byte order
    mark and one final line break, `\\n` or `\\r\\n`. UserError if it cannot be read, or is not
    UTF-8. `instead` is the option that gives the text itself."""
    if name != "-":
        text = read_text(Path(name))
    elif sys.stdin is None:
        raise UserError(f"standard input is closed: give {instead}, or the name of a file")
    else:
        text = decode_text(sys.stdin.buffer.read(), "standard input")
    return text.removesuffix("\n").removesuffix("\r")


def read_messages(name: str) -> Any:
    """The decoded JSON of a file of messages, or of standard input where the name is `-`. UserError
    as `read_input`, or if it is not JSON."""
    return decode_json(read_input(name, "--prompt"), f"{name}: ")


def choose_context(wanted: int | None, config: "ModelConfig", usual: int) -> int:
    """The cache positions of a row: those wanted, by default the model's, at most `usual`.
    UserError if the model has fewer than wanted."""
    positions = config.max_positions
    if wanted is not None and wanted > positions:
        raise UserError(f"--context {wanted}: the model has {positions} positions")
    return wanted or min(positions, usual)


def print_json(value: Any) -> None:
    """Prints a line of JSON. Where the encoding lacks a character, its escape still means it."""
    escape = (sys.stdout.encoding or "").lower() != "utf-8"
    print(json.dumps(value, ensure_ascii=escape, allow_nan=False), flush=True)


def _repair_streams() -> None:
    """Makes the standard streams take whatever is written to them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    # A terminal's encoding may lack characters that a model writes.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
