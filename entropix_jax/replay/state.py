"""The state of a row in a replay, and the records that its stages exchange."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from entropix_jax.names import THRESHOLDS
from entropix_jax.replay.formulas import Place, Proposal, ends_in
from entropix_jax.replay.threefry import row_key

MAX_REACH = 8  # positions that a row goes back at once
STATES = """inject.cooldown inject.begun lookup.cooldown lookup.begun branch.begun branch.forwards
    clarify.begun clarify.measured question backspace phrases think_end budget_forcing mirostat
    adaptive_p""".split()
TEXTS = """inject.thought dry.breakers phrases.banned think_end.text budget_forcing.end
    budget_forcing.wait clarify.prompt""".split()


@dataclass(frozen=True)
class Reading:
    """Logits after a token, and its attention statistics: see `stats.AttnStats`."""

    logits: np.ndarray  # [V]
    entropy: np.ndarray  # [L, N]
    varentropy: np.ndarray  # [L, N]
    divergence: np.ndarray  # [L]
    interaction: np.ndarray  # [L]


@dataclass(frozen=True)
class Line:
    """A line of the trace file."""

    number: int
    record: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.record.get(name)


class Doubt(Exception):
    """A line that does not follow."""

    def __init__(self, line: Line, stage: str, name: str, recorded: Any, recomputed: Any) -> None:
        self.line, self.stage, self.name = line, stage, name
        self.recorded, self.recomputed = recorded, recomputed

    def __str__(self) -> str:
        where = f"line {self.line.number}"
        where += "" if self.line["position"] is None else f", position {self.line['position']}"
        return (
            f"{where}, {self.stage}: {self.name} is {self.recorded!r}, recomputed "
            f"{_plain(self.recomputed)!r}"
        )


@dataclass
class Tally:
    """Counters and running values of a row."""

    queue: list[int] = field(default_factory=list)  # forced tokens that come next
    queue_action: str = "argmax"
    moments: tuple[float, float] = (0.0, 0.0)  # of the entropies: mean, summed squared deviation
    means: np.ndarray = field(default_factory=lambda: np.zeros(4))  # of P(wrong)
    drift: np.ndarray = field(default_factory=lambda: np.zeros(4, np.float32))
    states: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0))

    def copy(self) -> "Tally":
        """Returns a copy that later changes leave alone."""
        return replace(self, queue=[*self.queue], states={**self.states})


@dataclass(frozen=True)
class Entry:
    """A token of the row, and the data to draw its position again."""

    line: Line
    logprob: float
    proposal: Proposal
    before: Tally  # the row's, before the token
    after: Tally
    bans: list[int]  # tokens retracted there
    text: str


@dataclass(frozen=True)
class Seen:
    """The measures of one distribution."""

    place: Place
    reading: Reading
    metrics: dict[str, float]  # as the arms see them
    regimes: list[str]  # several where rounding decides
    rounds: int
    moments: tuple[float, float]
    means: np.ndarray


@dataclass(frozen=True)
class Verdict:
    """The decision of a control about a drawn token."""

    kind: str  # commit, force, rewind, fork, wait or end
    name: str = ""  # of the control
    tokens: Sequence[int] = ()
    back: int = 0
    states: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A possible outcome of a step."""

    regime: str
    proposal: Proposal  # by which the token is drawn
    action: str  # of the control that acts, or of the proposal
    token: int
    verdict: Verdict
    penalised: np.ndarray
    left: np.ndarray  # the logits that the token is drawn from
    given: np.ndarray  # to `adaptive_p`


class RowState:
    """A row while it is replayed: its tokens so far, and what they leave behind."""

    def __init__(
        self, header: Mapping[str, Any], lines: Sequence[Line], footer: Line, index: int, model: Any
    ) -> None:
        """`index` is that of the row in the footer."""
        self.v, self.model = header["sampler_parameters"], model
        self.lines, self.footer = lines, footer
        self.ended = footer["rows"][index]
        self.request = self.ended["request"]
        self.prompt = header["prompt_tokens"]
        self.tolerance = tolerance(model.epsilon)
        self.quantiles = quantiles(header)
        own = header["calibration"].get("wrong")
        given = self.v.get("wrong.table", "model")
        self.table = given if given != "model" else own and [own["weights"], *own["knots"]]
        self.seed = header["seed"]
        self.key = row_key(self.seed, self.request["row_id"])
        self.tokens, self.live, self.entries = [*self.prompt], list[Entry](), list[Entry]()
        self.tally, self.bans = Tally(), list[int]()
        self.again: Proposal | None = None  # by which the position is drawn again
        self.at = self.forwards = self.rewindable = self.reach = 0
        self.rounded = self.retracted = 0
        self.reason: str | None = None
        self.moves = [*self.request["moves"]]  # that are to come
        self.choice: Mapping[str, Any] = {}  # fields of a branch that is committed by force
        self.near = False  # whether rounding decided in this step
        # The last tokens that were read, of the row and of a branch.
        self.readings: dict[bool, tuple[list[int], int, Sequence[Reading]]] = {}
        self.stream = model.stream(self.prompt)
        self.texts = {
            key: [[*ids] for ids in map(model.encode, as_list(self.v[key])) if len(ids)]
            for key in TEXTS
        }
        self.end_ids = {*self.request["eos_ids"], *model.control_ids(self.request["stop"])}
        banned = [token for token, bias in self.v["draw.bias"] if bias <= -100]
        self.unwritable = {*self.v["draw.bans"], *banned}

    @property
    def generated(self) -> int:
        """The number of generated tokens."""
        return len(self.tokens) - len(self.prompt)

    @property
    def remaining(self) -> int:
        """The rest of the budget."""
        return int(self.request["budget"]) - self.generated

    def line_here(self) -> Line | None:
        """Returns the next line if it has the next position."""
        line = self.lines[self.at] if self.at < len(self.lines) else None
        return line if line is not None and line["position"] == len(self.tokens) else None

    def served(self) -> list[str]:
        """Returns the regimes and conditions that an arm serves."""
        served = ["lelv", "helv", "lehv", "hehv", "mid", "loop"]
        return [*served, "start"] if self.v["start.tokens"] > 0 else served

    def in_doubt(self) -> list[int]:
        """Returns how far back the row may go to a token in doubt, the last one first."""
        v, states, found = self.v, self.tally.states, []
        bound, free = np.float32(v["backspace.max_prob"]), len(self.model.texts)
        for back in range(1, min(v["backspace.reach"], self.rewindable) + 1):
            entry = self.live[-back]
            is_unsure = np.exp(np.float32(entry.logprob)) < bound or bound >= 1
            has_budget = len(entry.bans) < v["backspace.per_position"]
            has_token = len(entry.bans) + 1 + len(v["draw.bans"]) < free
            if is_unsure and has_budget and has_token:
                found.append(back)
        return found if states["backspace"] < v["backspace.per_row"] else []

    def find_reach(self) -> int:
        """Returns how many of its last tokens the row may retract at most."""
        v, held = self.v, 0
        if any(v[f"arms.{served}"] == "backspace" for served in self.served()):
            held = max(self.in_doubt(), default=0)
        if self.tally.states["phrases"] < v["phrases.per_row"]:
            begun = (
                n
                for phrase in self.texts["phrases.banned"]
                for n in range(1, len(phrase))
                if ends_in(self.tokens, phrase[:n])
            )
            held = max(held, min(max(begun, default=0), self.rewindable))
        return held

    def same(self, recorded: Any, value: Any) -> bool:
        """Whether a recorded value is a recomputed one, one of several, or within rounding."""
        if isinstance(value, tuple):
            return recorded in value
        if isinstance(value, float) and isinstance(recorded, int | float):
            return bool(abs(recorded - value) <= self.rounding(value))
        return bool(recorded == value)

    def rounding(self, value: Any) -> Any:
        """Returns the rounding error of a recomputed value or array."""
        return self.tolerance * (1 + abs(value))

    def check(self, line: Line, stage: str, **values: Any) -> None:
        """Raises Doubt for the first field that differs."""
        for name, value in values.items():
            self.expect(line, stage, name, line[name], value)

    def expect(self, line: Line, stage: str, name: str, recorded: Any, value: Any) -> None:
        """Raises Doubt if a recorded value differs from the recomputed one."""
        if not self.same(recorded, value):
            raise Doubt(line, stage, name, recorded, value)

    def add(self, entry: Entry) -> None:
        """Adds a token to the row."""
        self.live.append(entry)
        self.entries.append(entry)
        self.tokens.append(entry.line["token_id"])
        self.at += 1

    def retract(self, kept: int) -> None:
        """Removes all tokens but the first `kept` ones."""
        for entry in self.live[kept:]:
            self.check(entry.line, "rewind", type="retracted")
            self.retracted += 1
        del self.live[kept:], self.tokens[len(self.prompt) + kept :]
        self.stream = self.model.stream(self.prompt)
        for entry in self.live:
            self.stream.push(entry.line["token_id"])

    def stopped(self) -> int:
        """Returns the place of the first stop string in the row's text, -1 without one."""
        text = "".join(entry.text for entry in self.live)
        found = (text.find(stop) for stop in self.request["stop"] if stop)
        return min((at for at in found if at >= 0), default=-1)


def tolerance(epsilon: float) -> float:
    """Returns the relative rounding error of a run with this machine epsilon."""
    return min(1024 * epsilon, 0.1)


def quantiles(header: Mapping[str, Any]) -> np.ndarray:
    """Returns the quantiles that dynamic thresholds follow, float32 [4]."""
    found = []
    for name in THRESHOLDS:
        table = "entropy" if name.startswith("h") else "varentropy"
        written = header["percentiles"].get(f"thresholds.{name}")
        value = header["sampler_parameters"].get(f"thresholds.{name}", 0.0)
        values = header["calibration"]["quantiles"][table]
        percent = np.interp(value, values, np.arange(101.0))
        found.append(float(written.strip().rstrip("%")) if written else percent)
    return np.array(found, np.float32) / np.float32(100)


def as_list(value: Any) -> list[Any]:
    """Returns a text as a list of one, and a list unchanged."""
    return [value] if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """Returns a recomputed value as it is printed."""
    return value[0] if isinstance(value, tuple) else value
