"""`entropix-jax harness`: the lm-evaluation-harness's command with this package's models."""

import argparse
import sys
import traceback
from collections.abc import Sequence

from entropix_jax.cli.options import EXIT_OK
from entropix_jax.errors import UserError
from entropix_jax.host.cluster import ANY

_HELP = """usage: entropix-jax harness [OPTIONS]

Runs tasks of EleutherAI's lm-evaluation-harness with a model and a sampler of this package:

    entropix-jax harness --model_args pretrained=DIR,sampler=entropix,seed=1 --tasks gsm8k

OPTIONS are those of `lm_eval run`, and --ray as in `entropix-jax batch`. This command needs the
extra `harness`, which is not installed:

    pip install 'entropix-jax[harness]'

Then --help lists the options."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status.

    The arguments are those of `lm_eval run`, where `--model entropix_jax` and `--batch_size auto`
    are the defaults, and --ray, or those of `lm_eval ls` and `lm_eval validate`.
    """
    try:
        from entropix_jax.lab.harness_lm import EntropixLM  # registers the model
    except UserError:  # lm_eval is not installed
        if not {"-h", "--help"}.isdisjoint(arguments):
            print(_HELP)
            return EXIT_OK
        raise
    from lm_eval.__main__ import cli_evaluate

    from entropix_jax.host.compile_cache import use_compilation_cache

    use_compilation_cache()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ray", nargs="?", const=ANY)
    own, given = parser.parse_known_args(arguments)
    EntropixLM.ray = own.ray
    if given[:1] == ["run"]:
        del given[0]
    if given[:1] not in (["ls"], ["validate"]):
        if given:
            # If an option is repeated, the last one wins.
            has_file = any(option.partition("=")[0] in ("--config", "-C") for option in given)
            defaults = [] if has_file else ["--batch_size", "auto"]
            given = ["--model", "entropix_jax", *defaults, *given]
        given = ["run", *given]  # without further arguments it prints its help
    before, sys.argv = sys.argv, ["entropix-jax harness", *given]
    try:
        cli_evaluate()
    except ValueError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith("lm_eval.config"):  # of the arguments
            raise UserError(str(error)) from error
        raise
    finally:
        sys.argv = before
    return EXIT_OK
