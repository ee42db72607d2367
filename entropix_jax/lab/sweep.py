"""Sweeps: the tasks, settings, items and seeds of a study, read from a TOML file.

A sweep file is TOML:

    description = "..."
    tasks = ["sums", "facts"]     # names that `tasks.registry` knows; or prompts = "FILE.jsonl"
    items = 100                   # of each task; 0 for all. Or { sums = 50, facts = 100 }
    skip = 0                      # items of each task that come before those, as in another study
    seeds = [0, 1, 2]
    most_seeds = { facts = 1 }    # how many of them, from the first on, a task takes
    split = "test"
    max_new_tokens = 64           # default: the task's own. Or by task, as `items`
    base = "entropix"             # the sampler to change, itself a setting
    baseline = "entropix"         # the setting that the others are compared with
    baselines = ["greedy"]        # further ones

    [set]                         # changes to every setting
    "branch.depth" = 8
    [settings.no-branch]          # a setting: changes to the base, or to another sampler
    "arms.lehv" = "explore"
    [settings.greedy]
    sampler = "greedy"
    [grid]                        # a setting for each combination
    "thresholds.h1" = ["20%", 0.5]
    [random]                      # a setting for each random draw
    settings = 16
    seed = 0
    [random.over]
    "base.temperature" = { from = 0.2, to = 2.0, scale = "log" }
    "arms.lehv" = ["branch", "explore"]
    [tuning]                      # tunes these samplers first, on the tuning split
    samplers = ["top-p", "min-p"]
    settings = 8                  # candidates of each, the unchanged sampler included
    items = 50
    seeds = [0]
    [tuning.over.top-p]           # default: configs/ablations/ranges.toml, for a sampler file the
                                  # entry of the preset that it extends
    "base.top_p" = { from = 0.5, to = 1.0 }

Paths are relative to the file's folder.
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

from entropix_jax.errors import UserError, nearest
from entropix_jax.host.files import read_toml
from entropix_jax.host.resources import resource_folder
from entropix_jax.lab.by_task import ByTask
from entropix_jax.lab.ranges import draw_samplers, flatten, is_list_of, name_setting
from entropix_jax.lab.tasks.registry import locate_task
from entropix_jax.lab.tasks.task import Split
from entropix_jax.names import REGIMES
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.presets import lineage, load_sampler
from entropix_jax.sampler.sampler import Sampler

TUNED = " (tuned)"
_MAX_SETTINGS = 100_000
_MAX_SEED = 2**63 - 1  # an int64 column
_RANGES = Path("ablations/ranges.toml")
_KEYS = (
    *("description", "tasks", "prompts", "items", "skip", "seeds", "most_seeds"),
    *("split", "max_new_tokens"),
    *("base", "baseline", "baselines", "set", "settings", "grid", "random", "tuning"),
)

Calibrate = Callable[[Sampler], Sampler]  # resolves a sampler's percentiles for a model


@dataclass(frozen=True)
class Setting:
    """A named sampler.

    `varied` has the keys that a grid or a random draw varies, with this setting's values. `base` is
    the name of the setting that this one is a change of.
    """

    name: str
    sampler: Sampler
    varied: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None


@dataclass(frozen=True)
class Tuning:
    """Candidates of each sampler to tune, the same number for all; the first is unchanged."""

    candidates: Mapping[str, tuple[Setting, ...]]  # by the sampler's name
    items: ByTask  # 0: all
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Sweep:
    """A study's specification."""

    description: str
    tasks: tuple[str, ...]
    prompts: str | None  # a file of prompts instead of tasks
    items: ByTask  # 0: all
    skip: ByTask  # items before those
    seeds: tuple[int, ...]
    most_seeds: ByTask  # how many of them a task takes; 0: all
    split: Split
    max_new_tokens: ByTask
    settings: tuple[Setting, ...]
    tuning: Tuning | None
    baseline: str  # the name of a setting, tuned ones included
    baselines: tuple[str, ...] = ()  # further ones


def read_sweep(
    path: Path,
    calibrate: Calibrate = lambda sampler: sampler,
    mechanisms: Sequence[Mechanism] = (),
    data: str | None = None,
) -> Sweep:
    """Reads a sweep file.

    Args:
        calibrate: resolves a sampler's percentiles for the model, so that random draws are
            consistent with them. Called only for random draws and tuning.
        mechanisms: the user's own, which all samplers get.
        data: the folder of published files; see `locate_task`.

    Raises:
        UserError: the file is invalid; the message names the file and the key.
    """
    raw = read_toml(path)
    with _within(str(path)):
        return _Reader(raw, path.parent, calibrate, mechanisms, data).sweep()


@contextmanager
def _within(where: str) -> Iterator[None]:
    """Errors begin with their place."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def find_sweep(name: str) -> Path:
    """The path of a sweep file, given its path or the name of a shipped one.

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
        raise UserError(f"no sweep '{name}' (a file needs .toml){nearest(name, known)}")
    return resource_folder("configs") / "ablations" / f"{name}.toml"


def list_names(settings: Sequence[Setting], tuning: Tuning | None) -> list[str]:
    """Lists the names of a study's settings in order, tuned ones included.

    Raises:
        UserError: two are equal.
    """
    names = [setting.name for setting in settings]
    names += [
        name_tuned(*of_sampler) for of_sampler in (tuning.candidates if tuning else {}).items()
    ]
    for name, number in Counter(names).items():
        if number > 1:
            raise UserError(f"two settings are called '{name}'")
    return names


def name_tuned(sampler: str, candidates: Sequence[Setting]) -> str:
    """Names the best of a sampler's candidates."""
    return f"{sampler}{TUNED}" if len(candidates) > 1 else sampler


def make_tuning(
    samplers: Sequence[str],
    *,
    settings: int,
    items: ByTask,
    seeds: Sequence[int],
    over: Mapping[str, Mapping[str, Any]] | None = None,
    common: Mapping[str, Any] | None = None,
    calibrate: Calibrate = lambda sampler: sampler,
    mechanisms: Sequence[Mechanism] = (),
) -> Tuning:
    """Makes the candidates of each sampler: itself, then random draws from its ranges.

    A sampler file without ranges uses those of the nearest sampler that it extends. A sampler whose
    arms are all `argmax` has nothing to tune: it is its only candidate.

    Args:
        samplers: presets or sampler files.
        settings: number of candidates of each.
        over: ranges by sampler and key; default: `configs/ablations/ranges.toml`.
        common: changes to all samplers.
        calibrate, mechanisms: see `read_sweep`.

    Raises:
        UserError: an unknown sampler or key, two samplers of one name, or missing, invalid or too
            small ranges.
    """
    over = over or {}
    shipped = _shipped_ranges()
    candidates: dict[str, tuple[Setting, ...]] = {}
    for place in samplers:
        sampler = calibrate(load_sampler(place, mechanisms).with_values(common or {}))
        name = sampler.name
        if name in candidates:
            raise UserError(f"samplers: two are called '{name}'")
        group = [Setting(f"{name} #1", sampler)]
        if ranges := over[name] if name in over else _inherited_ranges(sampler, place, shipped):
            draws = draw_samplers(
                ranges, Random(f"tuning {name}"), sampler, settings - 1, f"over.{name}"
            )
            group += [
                Setting(f"{name} #{number}", changed, drawn)
                for number, (drawn, changed) in enumerate(draws, 2)
            ]
        candidates[name] = tuple(group)
    for name in over:
        if name not in candidates:
            raise UserError(f"over.{name}: not one of the samplers{nearest(name, [*candidates])}")
    return Tuning(candidates, items, tuple(seeds))


def _shipped_ranges() -> dict[str, dict[str, Any]]:
    path = resource_folder("configs") / _RANGES
    return {
        name: flatten(table) for name, table in read_toml(path).items() if isinstance(table, dict)
    }


def _inherited_ranges(
    sampler: Sampler, place: str, shipped: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The ranges of a sampler, else of the nearest one that it extends."""
    if all(sampler.values[f"arms.{regime}"] == "argmax" for regime in REGIMES):
        return {}
    for path in lineage(place):
        if path.stem in shipped:
            return shipped[path.stem]
    raise UserError(
        f"{place}: no ranges to tune it over: give [tuning.over.{sampler.name}] in a sweep file, or"
        " extend a preset"
    )


class _Reader:
    """Reads one sweep file."""

    def __init__(
        self,
        raw: dict[str, Any],
        folder: Path,
        calibrate: Calibrate,
        mechanisms: Sequence[Mechanism],
        data: str | None,
    ) -> None:
        self._raw = raw
        self._folder = folder
        self._calibrate = calibrate
        self._mechanisms = mechanisms
        self._data = data

    def sweep(self) -> Sweep:
        raw = self._raw
        self._check_keys(raw, _KEYS, "")
        tasks = self._texts("tasks")
        prompts = self._text("prompts")
        if bool(tasks) == (prompts is not None):
            raise UserError("give either 'tasks' or 'prompts'")
        split = self._text("split") or "test"
        if split not in get_args(Split):
            raise UserError(f"split = {split!r}: must be one of {', '.join(get_args(Split))}")
        tuning = self._tuning()
        if tuning and prompts is not None:
            raise UserError("tuning: 'prompts' have no answers to tune by")
        if tuning and split == "tuning":
            raise UserError("split = 'tuning': is used for tuning: test on the other one")
        settings = tuple(self._settings(tuning))
        names = list_names(settings, tuning)
        baseline = self._text("baseline") or names[0]
        baselines = self._texts("baselines")
        for name in (baseline, *baselines):
            if name not in names:
                key = "baseline" if name == baseline else "baselines"
                raise UserError(f"{key} = '{name}': no such setting{nearest(name, names)}")
        return Sweep(
            description=self._text("description") or "",
            tasks=tuple(map(self._task, tasks)),
            prompts=None if prompts is None else self._file(prompts),
            items=self._by_task(raw, "items", "items", default=100, least=0),
            skip=self._by_task(raw, "skip", "skip", default=0, least=0),
            seeds=self._seeds(raw, ""),
            most_seeds=self._by_task(raw, "most_seeds", "most_seeds", default=0, least=0),
            split="tuning" if split == "tuning" else "test",
            max_new_tokens=self._by_task(raw, "max_new_tokens", "max_new_tokens", None, 1),
            settings=settings,
            tuning=tuning,
            baseline=baseline,
            baselines=tuple(name for name in baselines if name != baseline),
        )

    def _settings(self, tuning: Tuning | None) -> Iterator[Setting]:
        raw = self._raw
        common = self._values(raw.get("set", {}), "set")
        base = self._sampler(self._text("base") or "entropix", common, "base")
        named = self._table(raw, "settings", "settings")
        grid = self._table(raw, "grid", "grid")
        random = self._table(raw, "random", "random")
        # The base is a setting if something refers to it, or if there is no other one.
        changed = any(isinstance(one, dict) and "sampler" not in one for one in named.values())
        mentioned = not raw.keys().isdisjoint(("base", "grid", "random"))
        if changed or mentioned or not (named or tuning):
            yield Setting(base.name, base)
        for name, changes in named.items():
            if not isinstance(changes, dict):
                raise UserError(f"settings.{name}: must be a table, [settings.{name}]")
            changes = dict(changes)
            other = changes.pop("sampler", None)
            where = f"settings.{name}"
            if other is not None and not isinstance(other, str):
                raise UserError(f"{where}.sampler: must be the name of a sampler")
            sampler = base if other is None else self._sampler(other, common, where)
            sampler = self._changed(sampler, self._values(changes, where), where)
            yield Setting(name, sampler, base=base.name if other is None else None)
        yield from self._grid(base, grid)
        yield from self._random(base, random)

    def _grid(self, base: Sampler, table: Mapping[str, Any]) -> Iterator[Setting]:
        axes = flatten(table)
        if "grid" in self._raw and not axes:
            raise UserError("grid: has no keys")
        for key, values in axes.items():
            if not isinstance(values, list) or not values:
                raise UserError(f"grid: {key}: must be a list of values")
            if len({name_setting({key: value}) for value in values}) < len(values):
                raise UserError(f"grid: {key}: has a value twice")
        number = math.prod(len(values) for values in axes.values())
        if number > _MAX_SETTINGS:
            raise UserError(f"grid: {number} settings: at most {_MAX_SETTINGS} are possible")
        if axes:
            for values in itertools.product(*axes.values()):
                point = dict(zip(axes, values, strict=True))
                sampler = self._changed(base, point, "grid")
                yield Setting(name_setting(point), sampler, point, base.name)

    def _random(self, base: Sampler, table: Mapping[str, Any]) -> Iterator[Setting]:
        if "random" not in self._raw:
            return
        self._check_keys(table, ("settings", "seed", "over"), "random: ")
        number = self._count(table, "settings", "random.settings", 16, 1, _MAX_SETTINGS)
        rng = Random(self._count(table, "seed", "random.seed", 0, 0))
        ranges = flatten(self._table(table, "over", "random.over"))
        if not ranges:
            raise UserError("random.over: has no keys")
        calibrated = self._calibrate(base)
        for drawn, sampler in draw_samplers(ranges, rng, calibrated, number, "random.over"):
            yield Setting(name_setting(drawn), sampler, drawn, base.name)

    def _tuning(self) -> Tuning | None:
        if "tuning" not in self._raw:
            return None
        table = self._table(self._raw, "tuning", "tuning")
        self._check_keys(table, ("samplers", "settings", "items", "seeds", "over"), "tuning: ")
        over = self._table(table, "over", "tuning.over")
        samplers = table.get("samplers")
        if not is_list_of(samplers, str) or not samplers:
            raise UserError("tuning.samplers: must be a list of samplers")
        settings = self._count(table, "settings", "tuning.settings", 8, 1, 1000)
        items = self._by_task(table, "items", "tuning.items", 50, 0)
        seeds = self._seeds(table, "tuning.")
        ranges = {name: self._values(over[name], f"tuning.over.{name}") for name in over}
        places = [self._place(name) for name in samplers]
        common = self._values(self._raw.get("set", {}), "set")
        with _within("tuning"):
            return make_tuning(
                places,
                settings=settings,
                items=items,
                seeds=seeds,
                over=ranges,
                common=common,
                calibrate=self._calibrate,
                mechanisms=self._mechanisms,
            )

    def _sampler(self, name: str, common: Mapping[str, Any], where: str) -> Sampler:
        with _within(where):
            sampler = load_sampler(self._place(name), self._mechanisms)
        return self._changed(sampler, common, "set")

    def _place(self, name: str) -> str:
        """The name of a preset, or the path of a sampler file."""
        return self._file(name) if name.endswith(".toml") else name

    def _task(self, name: str) -> str:
        """A task's name, with the paths of its files."""
        return locate_task(name, self._data, self._file)

    def _file(self, name: str) -> str:
        """A path relative to the sweep's folder, or a URL."""
        return name if "://" in name else str(self._folder / name)

    def _changed(self, sampler: Sampler, values: Mapping[str, Any], where: str) -> Sampler:
        with _within(where):
            return sampler.with_values(values) if values else sampler

    def _values(self, table: Any, where: str) -> dict[str, Any]:
        return flatten(self._table({where: table}, where, where))

    def _table(self, raw: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
        table = raw.get(key, {})
        if not isinstance(table, dict):
            raise UserError(f"{where}: must be a table, [{where}]")
        return table

    def _seeds(self, raw: Mapping[str, Any], within: str) -> tuple[int, ...]:
        seeds = raw.get("seeds", [0])
        if (
            not is_list_of(seeds, int)
            or not seeds
            or not 0 <= min(seeds) <= max(seeds) <= _MAX_SEED
        ):
            raise UserError(f"{within}seeds: must be a list of integers from 0 to {_MAX_SEED}")
        if len(set(seeds)) < len(seeds):
            raise UserError(f"{within}seeds: has a value twice")
        return tuple(seeds)

    def _by_task(
        self, raw: Mapping[str, Any], key: str, where: str, default: int | None, least: int
    ) -> ByTask:
        if key not in raw:
            return ByTask(default)
        if not isinstance(raw[key], dict):
            return ByTask(self._count(raw, key, where, 0, least))
        own = {task: self._count(raw[key], task, f"{where}.{task}", 0, least) for task in raw[key]}
        return ByTask(default, tuple(own.items()))

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
            raise UserError(f"{where} = {value!r}: must be an integer from {least} to {most}")
        return value

    def _text(self, key: str) -> str | None:
        value = self._raw.get(key)
        if value is not None and not isinstance(value, str):
            raise UserError(f"{key}: must be text")
        return value

    def _texts(self, key: str) -> tuple[str, ...]:
        value = self._raw.get(key, [])
        if not is_list_of(value, str):
            raise UserError(f"{key}: must be a list of texts")
        if len(set(value)) < len(value):
            raise UserError(f"{key}: has a value twice")
        return tuple(value)

    def _check_keys(self, raw: Mapping[str, Any], known: Sequence[str], within: str) -> None:
        for key in raw:
            if key not in known:
                raise UserError(f"{within}no key '{key}'{nearest(key, known)}")
