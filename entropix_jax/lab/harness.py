"""`python -m entropix_jax.harness`: the lm-evaluation-harness's command with this package's models.

The harness knows a model of another package only once something has imported it. This command does,
and hands its arguments on.
"""

import importlib
import sys
import traceback
from collections.abc import Sequence

from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.errors import UserError


def main(argv: Sequence[str] | None = None, prog: str = "python -m entropix_jax.harness") -> int:
    """Runs the command and returns its exit status.

    The arguments are those of `lm_eval run`, where `--model entropix_jax` and `--batch_size auto`
    are the defaults, or those of `lm_eval ls` and `lm_eval validate`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: _main(arguments, prog))


def _main(arguments: list[str], prog: str) -> int:
    # It registers the model, or says that the harness is missing.
    importlib.import_module("entropix_jax.lab.harness_lm")
    from lm_eval.__main__ import cli_evaluate

    from entropix_jax.host.compile_cache import use_compilation_cache

    use_compilation_cache()
    if arguments[:1] == ["run"]:
        del arguments[0]
    if arguments[:1] not in (["ls"], ["validate"]):
        arguments = ["run", *_with_defaults(arguments)]
    before, sys.argv = sys.argv, [prog, *arguments]
    try:
        cli_evaluate()
    except ValueError as error:
        if _raised_in(error).startswith("lm_eval.config"):  # of the arguments
            raise UserError(str(error)) from error
        raise
    finally:
        sys.argv = before
    return EXIT_OK


def _raised_in(error: BaseException) -> str:
    """The name of the module that raised it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__"))


def _with_defaults(arguments: list[str]) -> list[str]:
    """The arguments of `run`, with the model where they name none, and the size of a batch where
    neither they nor a file of settings does. No arguments at all stay so: they ask for help."""
    if not arguments:
        return []
    if not _given(arguments, "--model", "-M"):
        arguments = ["--model", "entropix_jax", *arguments]
    if not _given(arguments, "--batch_size", "-b", "--config", "-C"):
        arguments = ["--batch_size", "auto", *arguments]
    return arguments


def _given(arguments: Sequence[str], *names: str) -> bool:
    return any(argument.partition("=")[0] in names for argument in arguments)
