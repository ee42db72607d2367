"""`entropix-jax evaluate`: compares samplers, each tuned with the same effort."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropix_jax.cli.options import Count, OptionalCount
from entropix_jax.errors import check_range
from entropix_jax.lab.command import Names, StudyOptions, run_study

_SAMPLERS = ("temperature", "greedy", "entropix")


@dataclass(frozen=True, kw_only=True)
class Arguments(StudyOptions):
    """Compares samplers on tasks. The first sampler and majority votes of its samples are the
    baseline.

    Example:
        --task sums --model tiny --output build/study
    """

    task: Names
    """sums, word-problems, facts, forks, documents (for the tiny model); gsm8k, svamp, nq-open,
    ifeval, writing, each with its file (svamp:FILE.json) or without (see --data); or your own,
    module:attribute or file.py:attribute."""
    sampler: Names = ()
    """Presets or sampler files (default: temperature greedy entropix)."""
    items: Count = 100
    """Number of items per task; 0 for all."""
    seeds: Count = 3
    """Number of samples per item."""
    tune: Count = 0
    """Number of candidates per sampler to try on the tuning split first, the unchanged sampler
    included (0: no tuning)."""
    tune_items: Count = 50
    """Number of items per task to tune on."""
    max_new_tokens: OptionalCount = None
    """Maximum number of tokens in an answer (default: the task's own)."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    check_range("--items", arguments.items, 0)
    check_range("--seeds", arguments.seeds, 1)
    check_range("--tune", arguments.tune, 0)
    check_range("--tune-items", arguments.tune_items, 1)
    check_range("--max-new-tokens", arguments.max_new_tokens, 1)
    from entropix_jax.lab.sweep import Calibrate, Sweep, make_sweep
    from entropix_jax.sampler.presets import import_mechanisms

    samplers = list(dict.fromkeys(arguments.sampler)) or list(_SAMPLERS)
    tasks = list(dict.fromkeys(arguments.task))
    content: dict[str, Any] = {
        "description": f"{', '.join(samplers)} on {', '.join(tasks)}",
        "tasks": tasks,
        "items": arguments.items,
        "seeds": [*range(arguments.seeds)],
    }
    if arguments.max_new_tokens is not None:
        content["max_new_tokens"] = arguments.max_new_tokens
    if arguments.lookup is not None:
        content["lookup"] = arguments.lookup
    if arguments.tune:
        plan_of_tuning = {"settings": arguments.tune, "items": arguments.tune_items}
        content["tuning"] = {"samplers": samplers, **plan_of_tuning}
    else:
        content["samplers"] = samplers

    def plan(calibrate: Calibrate) -> Sweep:
        own = import_mechanisms(arguments.plugin)
        return make_sweep(content, Path(), calibrate, own, arguments.data)

    return run_study(plan, arguments)
