"""`entropix-jax verify`: recomputes a recorded run, token by token."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from entropix_jax.cli.options import EXIT_OK, Model, ModelOptions, Positional
from entropix_jax.cli.status import show_status
from entropix_jax.errors import UserError
from entropix_jax.host.files import check_regular

if TYPE_CHECKING:
    from entropix_jax.model.loading import LanguageModel
    from entropix_jax.replay import Trace

EXIT_DOUBT = 1


@dataclass(frozen=True)
class Arguments:
    """Recomputes each token of a trace from its settings, and prints the first line that differs.

    The exit status is 0 if every token follows from the settings, 1 if one does not.

    Example:
        run.jsonl
    """

    trace: Annotated[Positional, "TRACE"]
    """The trace of a run (`generate --trace FILE` or `batch --trace DIR`)."""
    model: Model = None
    """The model of the run, if its name in the trace is not valid here."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    path = Path(arguments.trace)
    check_regular(path, ": give a trace")
    from entropix_jax.replay import read_trace, replay

    # A damaged trace should not wait for the model.
    trace = read_trace(path)
    _check_settings(trace, path)
    from entropix_jax.replay.model import ModelReader

    model = _load(arguments.model, trace, path)
    longest = max((len(lines) for lines in trace.rows.values()), default=0)
    with show_status("recomputing the tokens"):
        found = replay(trace, ModelReader(model, len(trace.header["prompt_tokens"]) + longest))
    print(found if found.doubt is None else f"{path}: {found}")
    return EXIT_OK if found.doubt is None else EXIT_DOUBT


def _check_settings(trace: "Trace", path: Path) -> None:
    """Raises UserError if a setting is missing, malformed or out of range."""
    from entropix_jax.sampler.keys import check_values, check_whole

    values = trace.header["sampler_parameters"]
    check_values(values, f"{path}: line 1")
    check_whole(values, f"{path}: line 1")


def _load(name: str | None, trace: "Trace", path: Path) -> "LanguageModel":
    """Loads the model of a trace in its precision. UserError if it is another one."""
    header = trace.header
    precision = header["precision"]
    name = str(header["model"]) if name is None else name
    model = ModelOptions(dtype=precision["weights"], precision=precision["activations"]).load(name)
    own: Any = json.loads(json.dumps(asdict(model.config)))
    for here, there in ((own, header["model_config"]), (model.precision.to_json(), precision)):
        different = sorted(key for key in {*here, *there} if here.get(key) != there.get(key))
        if different:
            key = different[0]
            values = f"{key} {there.get(key)!r} in the trace, {here.get(key)!r} in {name}"
            raise UserError(f"{path}: line 1: another model: {values}: give the run's with --model")
    return model
