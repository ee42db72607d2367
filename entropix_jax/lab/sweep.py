"""Sweeps: the tasks, settings, items and seeds of a study, read from a TOML file.

docs/studies.md lists the keys. Paths are relative to the file's folder.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, get_args

from entropix_jax.engine.methods import find_method
from entropix_jax.engine.search import MAX_FORKS, SINGLE, Method
from entropix_jax.errors import UserError, nearest
from entropix_jax.host.arguments import as_integer
from entropix_jax.host.files import read_toml
from entropix_jax.host.resources import resource_folder
from entropix_jax.host.shapes import fits
from entropix_jax.lab.draws import draw_samplers, flatten_table, name_setting
from entropix_jax.lab.methods import METHODS
from entropix_jax.lab.tasks.registry import locate_task
from entropix_jax.lab.tasks.task import Split
from entropix_jax.names import REGIMES
from entropix_jax.sampler.files import lineage
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler

_MAX_SETTINGS = 100_000
_MAX_SEED = 2**63 - 1  # an int64 column
_MAX_MARGIN = 1000
_KEYS = (
    *("description", "tasks", "items", "skip", "seeds", "most_seeds", "split", "max_new_tokens"),
    *("base", "baseline", "baselines", "set", "samplers", "settings", "grid", "tuning", "compare"),
    "lookup",
)
_COMPARISON_KEYS = ("by", "curve", "settings", "pairs", "margin", "tasks")
COSTS = ("self_bleu", "forwards")  # measures that a comparison holds equal

Calibrate = Callable[[Sampler], Sampler]  # resolves a sampler's percentiles for a model


@dataclass(frozen=True)
class ByTask:
    """A number per task, such as the number of items: the task's own in `own`, else the
    `default`."""

    default: int | None
    own: Mapping[str, int] = field(default_factory=dict)

    def of(self, task: str) -> int | None:
        """The number of a task."""
        return self.own.get(task, self.default)

    def at_most(self, most: int) -> ByTask:
        """Returns these numbers, none above `most`; 0 and None mean no limit."""
        own = {task: min(number or most, most) for task, number in self.own.items()}
        return ByTask(min(self.default or most, most), own)

    def check_tasks(self, key: str, tasks: Sequence[str]) -> None:
        """Raises a UserError if a number is of none of these tasks."""
        for task in self.own:
            if task not in tasks:
                raise UserError(f"{key}.{task}: no such task{nearest(task, tasks)}")

    def to_json(self) -> int | dict[str, int | None] | None:
        """One number, or one for each task and, as `default`, all others."""
        return {**self.own, "default": self.default} if self.own else self.default


NONE = ByTask(0)


@dataclass(frozen=True)
class Setting:
    """A named sampler, and the method that searches with it.

    `forks` is the maximum number of continuations of a prompt. `varied` has the keys that a grid or
    a random draw varies, with this setting's values.
    """

    name: str
    sampler: Sampler
    varied: Mapping[str, Any] = field(default_factory=dict)
    method: Method = SINGLE
    forks: int = 1


@dataclass(frozen=True)
class Tuning:
    """Candidates of each sampler to tune, equally many for all. The first is unchanged."""

    candidates: Mapping[str, tuple[Setting, ...]]  # by the sampler's name
    items: ByTask  # 0: all
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """Settings to compare with a curve of other settings where both have the same `by`, one of
    `COSTS`.

    `pairs` are compared by their heights over the curve. A difference within +-`margin` is
    equivalent to 0. Scores are averaged over `tasks`, or all scored ones. `key` is the place in the
    sweep file.
    """

    key: str
    by: str
    curve: tuple[str, ...]
    settings: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...] = ()
    margin: float | None = None
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """A study's specification."""

    description: str
    tasks: tuple[str, ...]
    items: ByTask  # 0: all
    seeds: tuple[int, ...]
    max_new_tokens: ByTask
    settings: tuple[Setting, ...]
    tuning: Tuning | None
    baseline: str  # the name of a setting, tuned ones included
    skip: ByTask = NONE  # items before those
    most_seeds: ByTask = NONE  # how many of the seeds a task takes; 0: all
    split: Split = "test"
    baselines: tuple[str, ...] = ()  # further ones
    comparisons: tuple[Comparison, ...] = ()
    lookup: str | None = None  # the source, see `host.lookup`


def read_sweep(
    path: Path,
    calibrate: Calibrate = lambda sampler: sampler,
    mechanisms: Sequence[Mechanism] = (),
    data: str | None = None,
) -> Sweep:
    """Reads a sweep file. For arguments and errors see `make_sweep`; messages name the file. A file
    may have the settings of another one in its folder besides its own, `settings_of = "NAME.toml"`.
    """
    with within(str(path)):
        content = read_toml(path)
        if (name := content.pop("settings_of", None)) is not None:
            if not isinstance(name, str) or not name or Path(name).name != name:
                expected = "must be the name of a sweep file in the same folder"
                raise UserError(f"settings_of = {name!r}: {expected}")
            shared = _Table(read_toml(path.with_name(name))).table("settings").values
            own = _Table(content).table("settings").values
            content["settings"] = {**shared, **own}
        return make_sweep(content, path.parent, calibrate, mechanisms, data)


def make_sweep(
    content: Mapping[str, Any],
    folder: Path,
    calibrate: Calibrate = lambda sampler: sampler,
    mechanisms: Sequence[Mechanism] = (),
    data: str | None = None,
) -> Sweep:
    """Makes a sweep from the content of a sweep file.

    Args:
        folder: the folder of relative paths.
        calibrate: resolves a sampler's percentiles for the model, so that random draws are
            consistent with them. Called only for tuning.
        mechanisms: the user's own, which all samplers get.
        data: the folder of published files; see `locate_task`.

    Raises:
        UserError: the content is invalid; the message names the key.
    """
    return _Reader(_Table(content, known=_KEYS), folder, calibrate, mechanisms, data).sweep()


def _read_comparison(table: _Table, names: Sequence[str]) -> Comparison:
    """Reads one table of comparisons between settings of these names."""
    by, key = table.text("by"), table.name
    if by not in COSTS:
        raise UserError(f"{key}.by = {by!r}: must be one of {', '.join(COSTS)}")
    curve = table.values_of("curve", str)
    settings = table.values_of("settings", str, [name for name in names if name not in curve])
    pairs = table.get("pairs", [(str, str)], "a list of pairs of settings", [])
    named = {"curve": curve, "settings": settings, "pairs": [*itertools.chain(*pairs)]}
    for place, given in named.items():
        _check_names(f"{key}.{place}", given, names)
    if len(curve) < 2:
        raise UserError(f"{key}.curve: must have at least two settings")
    if not settings and not pairs:
        raise UserError(f"{key}.settings: must name a setting to compare")
    margin = table.values.get("margin")
    if margin is not None and not (fits(margin, float) and 0 < margin < _MAX_MARGIN):
        raise UserError(f"{key}.margin = {margin!r}: must be a number between 0 and {_MAX_MARGIN}")
    tasks = table.values_of("tasks", str)
    return Comparison(key, by, curve, settings, tuple(map(tuple, pairs)), margin, tasks)


def _check_names(key: str, given: Sequence[str], names: Sequence[str]) -> None:
    """Raises a UserError if a given setting is not one of these names."""
    for name in given:
        if name not in names:
            raise UserError(f"{key} = '{name}': no such setting{nearest(name, names)}")


@contextmanager
def within(where: str) -> Iterator[None]:
    """Prefixes the user errors of a block with their place."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def find_sweep(name: str) -> Path:
    """Returns the path of a sweep file, given its path or the name of a shipped one.

    Raises:
        UserError: there is no such sweep.
    """
    if name.endswith(".toml"):
        return Path(name)
    folder = resource_folder("configs") / "ablations"
    known = sorted(path.stem for path in folder.glob("*.toml") if path.stem != "ranges")
    if name not in known:
        raise UserError(f"no sweep '{name}' (a file needs .toml){nearest(name, known)}")
    return folder / f"{name}.toml"


def list_names(settings: Sequence[Setting], tuning: Tuning | None) -> list[str]:
    """Lists the names of a study's settings in order, tuned ones included.

    Raises:
        UserError: two are equal.
    """
    names = [setting.name for setting in settings]
    names += [name_tuned(*pair) for pair in (tuning.candidates if tuning else {}).items()]
    for name, number in Counter(names).items():
        if number > 1:
            raise UserError(f"two settings are called '{name}'")
    return names


def name_tuned(sampler: str, candidates: Sequence[Setting]) -> str:
    """Names the best of a sampler's candidates."""
    return f"{sampler} (tuned)" if len(candidates) > 1 else sampler


def _shipped_ranges(sampler: Sampler, place: str) -> dict[str, Any]:
    """The shipped ranges of a sampler, else of the nearest one that it extends. Empty for a sampler
    whose arms are all `argmax`, which has nothing to tune."""
    if all(sampler.values[f"arms.{regime}"] == "argmax" for regime in REGIMES):
        return {}
    shipped = read_toml(resource_folder("configs") / "ablations" / "ranges.toml")
    for path in lineage(place):
        if path.stem in shipped:
            return flatten_table(shipped[path.stem])
    raise UserError(
        f"{place}: no ranges to tune it over: give [tuning.over.{sampler.name}] in a sweep file, or"
        " extend a preset"
    )


class _Table:
    """A table of a sweep file. The getters raise UserError for a value of another type."""

    def __init__(self, values: Any, name: str = "", known: Sequence[str] = ()) -> None:
        if not isinstance(values, dict):
            raise UserError(f"{name}: must be a table, [{name}]")
        self.values, self.name, self._prefix = values, name, f"{name}." if name else ""
        for key in values if known else ():
            if key not in known:
                where = f"{name}: " if name else ""
                raise UserError(f"{where}no key '{key}'{nearest(key, known)}")

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, shape: Any, expected: str, default: Any = None) -> Any:
        """Returns a value of a shape, see `host.shapes`, or the default."""
        value = self.values.get(key, default)
        if value is not default and not fits(value, shape):
            raise UserError(f"{self._prefix}{key}: must be {expected}")
        return value

    def table(self, key: str, known: Sequence[str] = ()) -> _Table:
        return _Table(self.values.get(key, {}), f"{self._prefix}{key}", known)

    def flat(self, key: str) -> dict[str, Any]:
        """Returns a table with dotted keys."""
        return flatten_table(self.table(key).values)

    def count(self, key: str, default: int, least: int = 0, most: int = 2**31 - 1) -> int:
        number = as_integer(value := self.values.get(key, default))
        if number is None or not least <= number <= most:
            where = f"{self._prefix}{key}"
            raise UserError(f"{where} = {value!r}: must be an integer from {least} to {most}")
        return number

    def by_task(self, key: str, default: int | None, least: int = 0) -> ByTask:
        if not isinstance(self.values.get(key), dict):
            return ByTask(self.count(key, 0, least) if key in self else default)
        own = self.table(key)
        return ByTask(default, {task: own.count(task, 0, least) for task in own.values})

    def text(self, key: str) -> str | None:
        text: str | None = self.get(key, str, "text")
        return text

    def values_of(self, key: str, kind: type, default: Sequence[Any] = ()) -> tuple[Any, ...]:
        """Returns a list of distinct texts or integers."""
        kinds = {str: "a list of texts", int: "a list of integers"}
        values = self.get(key, [kind], kinds[kind], default)
        if len(set(values)) < len(values):
            raise UserError(f"{self._prefix}{key}: has a value twice")
        return tuple(values)

    def seeds(self) -> tuple[int, ...]:
        seeds = self.values_of("seeds", int, [0])
        if not seeds or not 0 <= min(seeds) <= max(seeds) <= _MAX_SEED:
            raise UserError(f"{self._prefix}seeds: must be integers from 0 to {_MAX_SEED}")
        return seeds


@dataclass(frozen=True)
class _Reader:
    """Reads the content of a sweep file; see `make_sweep`."""

    table: _Table
    folder: Path
    calibrate: Calibrate
    mechanisms: Sequence[Mechanism]
    data: str | None

    def sweep(self) -> Sweep:
        table = self.table
        tasks = table.values_of("tasks", str)
        if not tasks:
            raise UserError("tasks: must name a task")
        tasks = tuple(locate_task(name, self.data, self._file) for name in tasks)
        split = table.text("split") or "test"
        if split not in get_args(Split):
            raise UserError(f"split = {split!r}: must be one of {', '.join(get_args(Split))}")
        tuning = self._tuning() if "tuning" in table else None
        if tuning and split == "tuning":
            raise UserError("split = 'tuning' is used for tuning: use split = 'test'")
        settings = tuple(self._settings(tuning))
        names = list_names(settings, tuning)
        baseline = table.text("baseline") or names[0]
        baselines = table.values_of("baselines", str)
        lookup = table.text("lookup")
        _check_names("baseline", [baseline], names)
        _check_names("baselines", baselines, names)
        return Sweep(
            description=table.text("description") or "",
            tasks=tasks,
            items=table.by_task("items", 100),
            skip=table.by_task("skip", 0),
            seeds=table.seeds(),
            most_seeds=table.by_task("most_seeds", 0),
            split="tuning" if split == "tuning" else "test",
            max_new_tokens=table.by_task("max_new_tokens", None, 1),
            settings=settings,
            tuning=tuning,
            baseline=baseline,
            baselines=tuple(name for name in baselines if name != baseline),
            comparisons=tuple(self._comparisons(names)),
            lookup=lookup and self._source(lookup),
        )

    def _comparisons(self, names: Sequence[str]) -> Iterator[Comparison]:
        expected = "an array of tables, [[compare]]"
        for number, own in enumerate(self.table.get("compare", list, expected, []), 1):
            yield _read_comparison(_Table(own, f"compare.{number}", _COMPARISON_KEYS), names)

    def _settings(self, tuning: Tuning | None) -> Iterator[Setting]:
        table = self.table
        base = self._sampler(table.text("base") or "entropix", "base")
        named = table.table("settings")
        changes = {name: named.table(name) for name in named.values}
        # The base is a setting if something refers to it, or if there is no other one.
        samplers = [self._sampler(name, "samplers") for name in table.values_of("samplers", str)]
        changed = any("sampler" not in one for one in changes.values())
        mentioned = any(key in table for key in ("base", "grid"))
        if changed or mentioned or not (changes or samplers or tuning):
            yield Setting(base.name, base)
        yield from (Setting(sampler.name, sampler) for sampler in samplers)
        for name, own in changes.items():
            where, other = f"settings.{name}", own.text("sampler")
            named_method = own.text("method")
            forks = own.count("forks", 8 if named_method else 1, 1, MAX_FORKS)
            if named_method is None and "forks" in own:
                raise UserError(f"{where}.forks: needs a method")
            keys = ("sampler", "method", "forks")
            values = {key: value for key, value in own.values.items() if key not in keys}
            with within(where):
                sampler = base if other is None else self._sampler(other, "sampler")
                sampler = sampler.with_values(flatten_table(values))
                method = SINGLE if named_method is None else find_method(named_method, METHODS)
            yield Setting(name, sampler, {}, method, forks)
        if "grid" in table:
            yield from self._grid(base, table.flat("grid"))

    def _grid(self, base: Sampler, axes: Mapping[str, Any]) -> Iterator[Setting]:
        if not axes:
            raise UserError("grid: has no keys")
        for key, values in axes.items():
            if not isinstance(values, list) or not values:
                raise UserError(f"grid: {key}: must be a list of values")
            if len({name_setting({key: value}) for value in values}) < len(values):
                raise UserError(f"grid: {key}: has a value twice")
        number = math.prod(len(values) for values in axes.values())
        if number > _MAX_SETTINGS:
            raise UserError(f"grid: {number} settings: at most {_MAX_SETTINGS} are possible")
        for values in itertools.product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            with within("grid"):
                sampler = base.with_values(point)
            yield Setting(name_setting(point), sampler, point)

    def _tuning(self) -> Tuning:
        """The candidates of each sampler: itself, then random draws from its ranges."""
        known = ("samplers", "settings", "items", "seeds", "over")
        table = self.table.table("tuning", known)
        places = {}
        for name in table.values_of("samplers", str):
            sampler = self._sampler(name, "tuning")
            if sampler.name in places:
                raise UserError(f"tuning: samplers: two are called '{sampler.name}'")
            places[sampler.name] = self._place(name), sampler
        if not places:
            raise UserError("tuning.samplers: must be a list of samplers")
        over, candidates = table.table("over"), {}
        for name in over.values:
            if name not in places:
                close = nearest(name, [*places])
                raise UserError(f"tuning: over.{name}: not one of the samplers{close}")
        number = table.count("settings", 8, 1, 1000)
        for name, (place, sampler) in places.items():
            sampler = self.calibrate(sampler)
            group = [Setting(f"{name} #1", sampler)]
            with within("tuning"):
                if ranges := over.flat(name) if name in over else _shipped_ranges(sampler, place):
                    rng = Random(f"tuning {name}")
                    draws = draw_samplers(ranges, rng, sampler, number - 1, f"over.{name}")
                    group += [
                        Setting(f"{name} #{index}", changed, drawn)
                        for index, (drawn, changed) in enumerate(draws, 2)
                    ]
            candidates[name] = tuple(group)
        return Tuning(candidates, table.by_task("items", 50), table.seeds())

    def _sampler(self, name: str, where: str) -> Sampler:
        """A sampler with the changes of all settings."""
        with within(where):
            sampler = load_sampler(self._place(name), self.mechanisms)
        common = self.table.flat("set")
        with within("set"):
            return sampler.with_values(common)

    def _place(self, name: str) -> str:
        """The name of a preset, or the path of a sampler file."""
        return self._file(name) if name.endswith(".toml") else name

    def _source(self, name: str) -> str:
        """A source of lookups, with a path relative to the sweep's folder."""
        kind, path = ("exec:", name[5:]) if name.startswith("exec:") else ("", name)
        return kind + self._file(path)

    def _file(self, name: str) -> str:
        """A path relative to the sweep's folder, or a URL."""
        return name if "://" in name else str(self.folder / name)
