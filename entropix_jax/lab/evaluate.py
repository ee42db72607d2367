"""`python -m entropix_jax.evaluate`: compares samplers, each tuned with the same effort."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from entropix_jax.cli.options import (
    Activations,
    Count,
    Dtype,
    Folder,
    Model,
    Module,
    Texts,
    own_mechanisms,
    parse,
    run_command,
)
from entropix_jax.errors import UserError, check_range

_SAMPLERS = ("temperature", "greedy", "entropix")
_Names = Annotated[Texts, tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")]


@dataclass(frozen=True)
class Arguments:
    """Evaluates samplers on tasks. The first sampler and majority votes of its samples are the
    baseline.

    Example:
        --task sums --model tiny --output build/study
    """

    task: _Names
    """sums, word-problems, facts, forks, documents (for the tiny model); gsm8k, svamp, nq-open,
    ifeval, writing, each with its file (svamp:FILE.json) or without (see --data); or your own,
    module:attribute or file.py:attribute."""
    output: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """Folder of the results. The same command resumes an interrupted study."""
    sampler: _Names = ()
    """Presets or files (default: temperature greedy entropix)."""
    items: Count = 100
    """Items of each task; 0 for all."""
    seeds: Count = 3
    """Samples of each item."""
    tune: Count = 0
    """Candidates of each sampler to try on the tuning split first, the unchanged one included
    (0: no tuning)."""
    tune_items: Count = 50
    """Items of each task to tune on."""
    max_new_tokens: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Limit of an answer (default: the task's own)."""
    data: Folder = None
    """Folder of the published files of tasks that are named without a file: gsm8k_test.jsonl,
    svamp.json, nq_open_dev.jsonl, ifeval.jsonl, prompts.csv (default: the environment variable
    ENTROPIX_DATA)."""
    model: Model = None
    """smollm2, tiny, a folder in the Hugging Face layout, a GGUF file, or a hub id owner/name
    (default: smollm2 if its package is installed, else tiny)."""
    slots: Count = 64
    """Rows in parallel."""
    dtype: Dtype = None
    """Dtype of the weights in memory (default: the checkpoint's)."""
    precision: Activations = None
    """Type of hidden states (default: on a CPU float32, else the weights')."""
    plugin: Module = None
    """Import a Python module whose MECHANISMS the samplers may use. Its code runs."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m entropix_jax.evaluate") -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: _main(parse(Arguments, argv, prog)))


def _main(arguments: Arguments) -> int:
    check_range("--items", arguments.items, 0)
    check_range("--seeds", arguments.seeds, 1)
    check_range("--tune", arguments.tune, 0)
    check_range("--tune-items", arguments.tune_items, 1)
    check_range("--max-new-tokens", arguments.max_new_tokens, 1)
    from entropix_jax.lab.by_task import NONE, ByTask
    from entropix_jax.lab.command import run_study
    from entropix_jax.lab.sweep import Calibrate, Setting, Sweep, list_names, make_tuning
    from entropix_jax.lab.tasks.registry import locate_task
    from entropix_jax.sampler.presets import load_sampler

    names = list(dict.fromkeys(itertools.chain(*arguments.sampler))) or list(_SAMPLERS)
    tasks = tuple(dict.fromkeys(itertools.chain(*arguments.task)))
    if not tasks:
        raise UserError("--task must be given (see --help)")
    located = tuple(locate_task(name, arguments.data) for name in tasks)
    own = own_mechanisms(arguments.plugin)
    samplers = [load_sampler(name, own) for name in names]

    def plan(calibrate: Calibrate) -> Sweep:
        settings: tuple[Setting, ...] = ()
        tuning = None
        if arguments.tune:
            tuning = make_tuning(
                names,
                settings=arguments.tune,
                items=ByTask(arguments.tune_items),
                seeds=[0],
                calibrate=calibrate,
                mechanisms=own,
            )
        else:
            settings = tuple(Setting(sampler.name, sampler) for sampler in samplers)
        return Sweep(
            description=f"{', '.join(names)} on {', '.join(tasks)}",
            tasks=located,
            prompts=None,
            items=ByTask(arguments.items),
            skip=NONE,
            seeds=tuple(range(arguments.seeds)),
            most_seeds=ByTask(0),
            split="test",
            max_new_tokens=ByTask(arguments.max_new_tokens),
            settings=settings,
            tuning=tuning,
            baseline=list_names(settings, tuning)[0],
        )

    return run_study(
        plan,
        Path(arguments.output),
        model=arguments.model,
        slots=arguments.slots,
        dtype=arguments.dtype,
        precision=arguments.precision,
    )
