"""The trace of a run: JSON Lines, a header, one object for each token, a footer.

The same run gives the same bytes, except for the timings in the footer.
"""

import json
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np

from entropix_jax.engine.calibrated import CalibratedSampler
from entropix_jax.errors import UserError
from entropix_jax.host.decimals import shorten
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import TRACE_FORMAT
from entropix_jax.sampler.state import Tally
from entropix_jax.version import __version__


@dataclass(frozen=True, slots=True)
class BranchRecord:
    """One branch that was rolled out. `score` is None if its logits became NaN or infinite."""

    tokens: list[int]
    text: str
    score: float | None
    chosen: bool


# The fields of a line, in order.
_ORDER = """row position context token_id text regime action logprob entropy varentropy
    sequence_varentropy attn_entropy attn_entropy_norm attn_varentropy agreement agreement_published
    interaction_strength confidence token_confidence self_certainty max_prob p_wrong temperature
    top_k top_p min_p forwards loop top branches layers layers_varentropy attention ambiguous
    intents chosen""".split()


@dataclass(slots=True)
class MeasuredToken:
    """A token, and the metrics of the distribution before it. Entropies are in bits, varentropies
    in bits^2, log-probabilities in nats.

    `text` is the text that the token completes: a row's texts, joined, are the row's text
    (including the stop string that ended it). It is empty in the middle of a character and for
    control tokens.
    """

    position: int
    token_id: int
    text: str
    regime: str
    logprob: float
    entropy: float
    varentropy: float
    sequence_varentropy: float
    attn_entropy: float
    attn_entropy_norm: float
    attn_varentropy: float
    agreement: float
    agreement_published: float
    interaction_strength: float
    token_confidence: float
    self_certainty: float
    max_prob: float

    def present(self, without: Collection[str] = ()) -> dict[str, Any]:
        """Returns the fields of a line that are not None, in order, `without` some of them."""
        values = {name: getattr(self, name, None) for name in _ORDER if name not in without}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(slots=True)  # not frozen: the engine makes one for each token, and fills in its text
class TokenRecord(MeasuredToken):
    """One committed token.

    `forwards` counts the token positions of the row that were evaluated beyond its prompt when the
    token was chosen. `top`, [token id, text, probability] of the most likely tokens, `layers` and
    `layers_varentropy`, the attention entropy and varentropy of each layer and head, in lists or as
    float32 [L, N] (see `Recording.raw_layers`), and `attention`, the positions that three heads
    attend to most, are None unless recorded. `branches`, all branches that were rolled out, and
    `ambiguous`, whether the two best scores were within the margin and their texts differ, are None
    except on the first token of a branch. `intents` is the entropy over the branches' intents in
    bits, None except on the first token after a fork of `clarify`. `chosen` is True on a token that
    a person chose, else None. `p_wrong` is None without a table. `state`, the sampler's state after
    the token, for one row, is None unless recorded, and not part of a trace.
    """

    row: int
    action: str
    confidence: float
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    forwards: int
    loop: bool
    p_wrong: float | None = None
    top: list[tuple[int, str, float]] | None = None
    branches: list[BranchRecord] | None = None
    layers: list[list[float]] | np.ndarray | None = None
    ambiguous: bool | None = None
    intents: float | None = None
    chosen: bool | None = None
    layers_varentropy: list[list[float]] | np.ndarray | None = None
    attention: list[dict[str, Any]] | None = None
    state: Tally | None = field(default=None, compare=False, repr=False)

    def to_json(self, *, retracted: bool = False, without: Collection[str] = ()) -> dict[str, Any]:
        """Returns the object of a trace line, of a committed token or of a retracted one, `without`
        some of its fields."""
        values = self.present(without)
        if "branches" in values:
            values["branches"] = [asdict(branch) for branch in values["branches"]]
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                values[name] = plain(value)
        return {"type": "retracted" if retracted else "token", **values}


def plain(value: Any) -> Any:
    """Arrays as Python numbers and lists; a float32 becomes its shortest round-trip decimal."""
    array = np.asarray(value)
    if array.dtype.kind != "f":
        return array.tolist()
    # Plus 0: the entropy of a certain distribution is computed as -0.
    return (shorten(array) + 0.0).tolist()


def header(
    model: LanguageModel,
    sampler: CalibratedSampler,
    prompt_tokens: Sequence[int],
    *,
    seed: int | None,
    name: str | None = None,
    messages: Sequence[Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """The header object. `seed` is None where nothing was sampled; `name` is the model's, by
    default its folder; `messages` are those of a chat."""
    return {
        "type": "header",
        "format_version": TRACE_FORMAT,
        "model": str(model.folder) if name is None else name,
        "model_config": asdict(model.config),
        "precision": model.precision.to_json(),
        "sampler": sampler.name,
        "sampler_parameters": dict(sorted(sampler.values.items())),
        "percentiles": dict(sorted(sampler.sampler.percentiles.items())),
        # Only controls of studies use the tables at each entropy.
        "calibration": replace(sampler.calibration, at_entropy=None).to_json(),
        "seed": seed,
        "versions": {
            "entropix_jax": __version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
            "python": platform.python_version(),
        },
        "backend": jax.default_backend(),
        "prompt": model.tokenizer.decode(prompt_tokens, skip_special=False),
        "prompt_tokens": list(prompt_tokens),
        **({} if messages is None else {"messages": [dict(one) for one in messages]}),
    }


def footer(rows: Sequence[Mapping[str, Any]], timings: Mapping[str, float]) -> dict[str, Any]:
    """The footer object: finish reason and counts of each row, and the run's timings in seconds."""
    return {"type": "footer", "rows": list(rows), "timings": dict(timings)}


class TraceWriter:
    """Writes a trace line by line as the run goes, so that an interrupted run leaves its tokens.

    A context manager, which closes the file.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file. UserError if it cannot be written."""
        self._path = path
        try:
            # A name with bytes that are not UTF-8 becomes a JSON escape.
            self._file = open(  # noqa: SIM115
                path, "w", buffering=1, encoding="utf-8", errors="backslashreplace"
            )
        except OSError as error:
            raise self._failure(error) from None

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds one object. UserError if the file cannot be written (a full disk, for example)."""
        try:
            self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise self._failure(error) from None

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._file.close()
        except OSError as failure:
            raise self._failure(failure) from None

    def _failure(self, error: OSError) -> UserError:
        return UserError(f"{self._path}: cannot be written: {error.strerror}")
