"""What a study runs: its tasks, its settings, and how many items and seeds each of them gets.

A sweep file is TOML:

    description = "..."
    tasks = ["sums", "facts"]     # names that `tasks.find_task` knows; or prompts = "FILE.jsonl"
    items = 100                   # of each task, 0 for all of them
    seeds = [0, 1, 2]
    split = "test"
    max_new_tokens = 64           # else the task's own
    base = "entropix"             # the sampler that is changed
    baseline = "base"             # the setting that the others are held against

    [set]                         # changes of every setting
    "branch.depth" = 4
    [settings.no-branch]          # a setting, by its changes of the base, or of another sampler
    "arms.lehv" = "explore"
    [settings.greedy]
    sampler = "greedy"
    [grid]                        # a setting for each combination
    "thresholds.h1" = [0.1, 0.2]
    [random]                      # or for each of some random draws
    settings = 16
    seed = 0
    [random.over]
    "base.temperature" = { from = 0.2, to = 2.0, scale = "log" }
    "arms.lehv" = ["branch", "explore"]
    [tuning]                      # each of these samplers is tuned first, on the other split
    samplers = ["top-p", "min-p"]
    settings = 8                  # tried of each, its own values among them
    items = 50
    seeds = [0]
    [tuning.over.top-p]           # else as in configs/ablations/ranges.toml
    "base.top_p" = { from = 0.5, to = 1.0 }
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, get_args

from entropix_jax.errors import UserError
from entropix_jax.files import read_text
from entropix_jax.resources import resource_folder
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import Sampler, nearest
from entropix_jax.tasks.task import Split

BASE = "base"  # the setting that changes nothing
TUNED = " (tuned)"
_MOST_SETTINGS = 100_000
_RANGES = Path("ablations/ranges.toml")
_KEYS = (
    *("description", "tasks", "prompts", "items", "seeds", "split", "max_new_tokens", "base"),
    *("baseline", "set", "settings", "grid", "random", "tuning"),
)


@dataclass(frozen=True)
class Setting:
    """A sampler under a name of its own.

    `varied` are the keys that tell it from the others of its kind, with their values: the axes
    along which a response can be drawn.
    """

    name: str
    sampler: Sampler
    varied: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tuning:
    """How samplers are tuned: each by the same number of candidates, of which the first is the
    sampler as it is."""

    candidates: Mapping[str, tuple[Setting, ...]]  # by the sampler's name
    items: int
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Sweep:
    """A study as it was asked for."""

    description: str
    tasks: tuple[str, ...]
    prompts: str | None  # a file of prompts in place of tasks
    items: int  # of each task, 0 for all
    seeds: tuple[int, ...]
    split: Split
    max_new_tokens: int | None
    settings: tuple[Setting, ...]
    tuning: Tuning | None
    baseline: str  # the name of a setting, tuned ones included


def read_sweep(path: Path) -> Sweep:
    """The sweep of a file.

    Raises:
        UserError: it is none; the line names the file and the key.
    """
    try:
        raw = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    folder = path.parent
    return _Reader(str(path), raw, folder).sweep()


def find_sweep(name: str) -> Path:
    """The sweep file of that path, or the one of a name that comes with the package.

    Raises:
        UserError: there is no such sweep.
    """
    if name.endswith(".toml"):
        return Path(name)
    known = sorted(
        path.stem
        for path in (resource_folder("configs") / "ablations").glob("*.toml")
        if path.name != _RANGES.name
    )
    if name not in known:
        raise UserError(f"no sweep '{name}' (a file's name ends in .toml){nearest(name, known)}")
    return resource_folder("configs") / "ablations" / f"{name}.toml"


def tuning_of(
    samplers: Sequence[str],
    *,
    settings: int,
    items: int,
    seeds: Sequence[int],
    over: Mapping[str, Mapping[str, Any]] | None = None,
    where: str = "tuning",
) -> Tuning:
    """Candidates for each sampler: its own values, then random draws from its ranges.

    A sampler without ranges has nothing to tune and is its own one candidate.

    Args:
        samplers: presets or sampler files.
        settings: candidates of each.
        over: ranges by sampler and key; those of `configs/ablations/ranges.toml` for the others.

    Raises:
        UserError: an unknown sampler or key, or a range that is none.
    """
    ranges = {**_shipped_ranges(), **(over or {})}
    candidates = {}
    for name in samplers:
        sampler = load_sampler(name)
        own = ranges.get(sampler.name, {})
        found = [Setting(f"{sampler.name} #1", sampler)]
        rng = Random(f"tuning {sampler.name}")
        for number in range(2, settings + 1 if own else 2):
            drawn = _draw(own, rng, sampler, f"{where}: {sampler.name}")
            found.append(Setting(f"{sampler.name} #{number}", sampler.with_values(drawn), drawn))
        candidates[sampler.name] = tuple(found)
    return Tuning(candidates, items, tuple(seeds))


def _shipped_ranges() -> dict[str, dict[str, Any]]:
    path = resource_folder("configs") / _RANGES
    return {
        name: _flatten_values(table)
        for name, table in tomllib.loads(read_text(path)).items()
        if isinstance(table, dict)
    }


class _Reader:
    """Reads one file's sweep; what is wrong is told with the file's name."""

    def __init__(self, where: str, raw: dict[str, Any], folder: Path) -> None:
        self._where = where
        self._raw = raw
        self._folder = folder

    def sweep(self) -> Sweep:
        raw = self._raw
        self._check_keys(raw, _KEYS, "")
        tasks = self._texts("tasks")
        prompts = self._text("prompts")
        if bool(tasks) == (prompts is not None):
            raise self._error("give either 'tasks' or 'prompts'")
        split = self._text("split") or "test"
        if split not in get_args(Split):
            raise self._error(f"split = {split!r}: must be one of {', '.join(get_args(Split))}")
        tuning = self._tuning()
        settings = tuple(self._settings(tuning))
        tuned = [f"{name}{TUNED}" for name in (tuning.candidates if tuning else ())]
        names = [*(setting.name for setting in settings), *tuned]
        for name in names:
            if names.count(name) > 1:
                raise self._error(f"two settings are called '{name}'")
        baseline = self._text("baseline") or names[0]
        if baseline not in names:
            raise self._error(f"baseline = '{baseline}': no such setting{nearest(baseline, names)}")
        most = raw.get("max_new_tokens")
        return Sweep(
            description=self._text("description") or "",
            tasks=tasks,
            prompts=None if prompts is None else str(self._folder / prompts),
            items=self._count(raw, "items", "items", default=100, least=0),
            seeds=self._seeds(raw, ""),
            split="tuning" if split == "tuning" else "test",
            max_new_tokens=None if most is None else self._count(raw, "max_new_tokens", "", 1, 1),
            settings=settings,
            tuning=tuning,
            baseline=baseline,
        )

    def _settings(self, tuning: Tuning | None) -> Iterator[Setting]:
        raw = self._raw
        common = self._values(raw.get("set", {}), "set")
        base = self._sampler(self._text("base") or "entropix", common, "set")
        named = self._table(raw, "settings", "settings")
        grid = self._table(raw, "grid", "grid")
        random = self._table(raw, "random", "random")
        if "base" in raw or grid or random or not (named or tuning):
            yield Setting(BASE, base)
        for name, changes in named.items():
            if not isinstance(changes, dict):
                raise self._error(f"settings.{name}: must be a table, [settings.{name}]")
            changes = dict(changes)
            other = changes.pop("sampler", None)
            if other is not None and not isinstance(other, str):
                raise self._error(f"settings.{name}.sampler: must be the name of a sampler")
            sampler = base
            if other is not None:
                sampler = self._sampler(other, common, f"settings.{name}")
            values = self._values(changes, f"settings.{name}")
            yield Setting(name, self._changed(sampler, values, f"settings.{name}"))
        yield from self._grid(base, grid)
        yield from self._random(base, random)

    def _grid(self, base: Sampler, table: Mapping[str, Any]) -> Iterator[Setting]:
        axes = _flatten_values(table)
        for key, values in axes.items():
            if not isinstance(values, list) or not values:
                raise self._error(f"grid: {key}: must be a list of values")
        number = math.prod(len(values) for values in axes.values())
        if number > _MOST_SETTINGS:
            raise self._error(f"grid: {number} settings, at most {_MOST_SETTINGS} are possible")
        if axes:
            for values in itertools.product(*axes.values()):
                yield self._point(base, dict(zip(axes, values, strict=True)), "grid")

    def _random(self, base: Sampler, table: Mapping[str, Any]) -> Iterator[Setting]:
        if not table:
            return
        self._check_keys(table, ("settings", "seed", "over"), "random: ")
        number = self._count(table, "settings", "random.settings", 16, 1, _MOST_SETTINGS)
        rng = Random(self._count(table, "seed", "random.seed", 0, 0))
        ranges = _flatten_values(self._table(table, "over", "random.over"))
        if not ranges:
            raise self._error("random.over: no key to draw values of")
        for _ in range(number):
            yield self._point(
                base, _draw(ranges, rng, base, f"{self._where}: random.over"), "random"
            )

    def _point(self, base: Sampler, values: dict[str, Any], where: str) -> Setting:
        name = " ".join(f"{key}={_short(value)}" for key, value in values.items())
        return Setting(name, self._changed(base, values, where), values)

    def _tuning(self) -> Tuning | None:
        table = self._table(self._raw, "tuning", "tuning")
        if not table:
            return None
        self._check_keys(table, ("samplers", "settings", "items", "seeds", "over"), "tuning: ")
        over = self._table(table, "over", "tuning.over")
        samplers = table.get("samplers")
        if not _is_list(samplers, str) or not samplers:
            raise self._error("tuning.samplers: must be a list of samplers")
        return tuning_of(
            [self._place(name) for name in samplers],
            settings=self._count(table, "settings", "tuning.settings", 8, 1, 1000),
            items=self._count(table, "items", "tuning.items", 50, 0),
            seeds=self._seeds(table, "tuning."),
            over={name: _flatten_values(ranges) for name, ranges in over.items()},
            where=f"{self._where}: tuning",
        )

    def _sampler(self, name: str, common: Mapping[str, Any], where: str) -> Sampler:
        try:
            sampler = load_sampler(self._place(name))
        except UserError as error:
            raise self._error(f"{where}: {error}") from None
        return self._changed(sampler, common, "set")

    def _place(self, name: str) -> str:
        """A sampler file is named from the sweep's own folder."""
        return str(self._folder / name) if name.endswith(".toml") else name

    def _changed(self, sampler: Sampler, values: Mapping[str, Any], where: str) -> Sampler:
        try:
            return sampler.with_values(values) if values else sampler
        except UserError as error:
            raise self._error(f"{where}: {error}") from None

    def _values(self, table: Any, where: str) -> dict[str, Any]:
        if not isinstance(table, dict):
            raise self._error(f"{where}: must be a table, [{where}]")
        return _flatten_values(table)

    def _table(self, raw: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
        table = raw.get(key, {})
        if not isinstance(table, dict):
            raise self._error(f"{where}: must be a table, [{where}]")
        return table

    def _seeds(self, raw: Mapping[str, Any], within: str) -> tuple[int, ...]:
        seeds = raw.get("seeds", [0])
        if not _is_list(seeds, int) or not seeds or min(seeds) < 0:
            raise self._error(f"{within}seeds: must be a list of integers from 0")
        if len(set(seeds)) < len(seeds):
            raise self._error(f"{within}seeds: one stands there twice")
        return tuple(seeds)

    def _count(
        self,
        raw: Mapping[str, Any],
        key: str,
        where: str,
        default: int,
        least: int,
        most: int = 2**31 - 1,
    ) -> int:
        value = raw.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._error(f"{where or key} = {value!r}: must be an integer from {least}")
        return value

    def _text(self, key: str) -> str | None:
        value = self._raw.get(key)
        if value is not None and not isinstance(value, str):
            raise self._error(f"{key}: must be text")
        return value

    def _texts(self, key: str) -> tuple[str, ...]:
        value = self._raw.get(key, [])
        if not _is_list(value, str):
            raise self._error(f"{key}: must be a list of texts")
        if len(set(value)) < len(value):
            raise self._error(f"{key}: one stands there twice")
        return tuple(value)

    def _check_keys(self, raw: Mapping[str, Any], known: Sequence[str], within: str) -> None:
        for key in raw:
            if key not in known:
                raise self._error(f"{within}no key '{key}'{nearest(key, known)}")

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self._where}: {problem}")


def _is_range(value: Any) -> bool:
    return isinstance(value, dict) and set(value) <= {"from", "to", "scale"} and bool(value)


def _flatten_values(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys to values; a range is a value."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and not _is_range(value):
            flat.update(_flatten_values(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _draw(ranges: Mapping[str, Any], rng: Random, sampler: Sampler, where: str) -> dict[str, Any]:
    """A value for each key: one of a list, or a number of a range; whole where the sampler's is."""
    drawn: dict[str, Any] = {}
    for key, values in ranges.items():
        if isinstance(values, list) and values:
            drawn[key] = rng.choice(values)
            continue
        ends = _ends(values)
        if ends is None:
            raise UserError(
                f"{where}: {key}: must be a list of values, or"
                ' { from = LOW, to = HIGH, scale = "linear" or "log" }'
            )
        scale = values.get("scale")
        low, high = map(math.log if scale == "log" else float, ends)
        number = rng.uniform(low, high)
        number = math.exp(number) if scale == "log" else number
        whole = isinstance(sampler.values.get(key), int)
        drawn[key] = round(number) if whole else float(f"{number:.4g}")
    return drawn


def _ends(values: Any) -> tuple[float, float] | None:
    """Where a range begins and ends; None where it is no range."""
    if not _is_range(values):
        return None
    low, high, scale = values.get("from"), values.get("to"), values.get("scale", "linear")
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (low, high))
    if not numbers or scale not in ("linear", "log") or not low < high:
        return None
    return None if scale == "log" and low <= 0 else (low, high)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(v, kind) and not isinstance(v, bool) for v in value
    )


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
