"""The command `entropix-jax`, also as `python -m entropix_jax`."""

import importlib
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Sequence
from typing import NoReturn

from entropix_jax.errors import UserError, nearest
from entropix_jax.host.heap import reuse_memory
from entropix_jax.host.interrupts import exit_at_once
from entropix_jax.version import __version__

# The module of each subcommand, and what it does. A module has a function `run` and a dataclass
# `Arguments`, which it takes; one without takes the list of texts.
COMMANDS = {
    "generate": ("cli.generate", "generates text from a prompt, and shows its uncertainty"),
    "chat": ("chat.command", "chats in the terminal, and shows the uncertainty of each answer"),
    "batch": ("cli.batch", "generates texts for a file of prompts; a stopped run resumes"),
    "inspect": ("cli.inspect", "prints the uncertainty of a given text"),
    "serve": ("serve.command", "serves a model with an OpenAI-compatible API and a live page"),
    "ablate": ("lab.ablate", "compares settings of a sampler on tasks"),
    "evaluate": ("lab.evaluate", "compares samplers on tasks, each tuned with the same effort"),
    "pivots": ("lab.pivots", "finds the tokens that decide greedy answers"),
    "lookups": ("lab.lookups", "measures which answers should be looked up, and where"),
    "harness": ("lab.harness", "runs tasks of EleutherAI's lm-evaluation-harness"),
    "calibrate": ("lab.calibrate", "measures the percentiles of a model's own answers"),
    "report": ("cli.report", "makes a web page from a trace"),
    "verify": ("cli.verify", "recomputes each token of a trace from its settings"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that the first argument names, and returns its exit status.

    Without `argv` it is the program: the arguments are the process's, and Ctrl-C ends it until
    there is something to lose.
    """
    if argv is None:
        exit_at_once()
        reuse_memory()
        # XLA logs slow compilations as errors. Real ones are exceptions of Python, too.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        argv = sys.argv[1:]
    name, *arguments = argv or [""]
    from entropix_jax.cli.options import run_command

    return run_command(lambda: _run(name, arguments))


def _run(name: str, arguments: Sequence[str]) -> int:
    from entropix_jax.cli.options import EXIT_USAGE, parse

    if name in COMMANDS:
        module = importlib.import_module(f"entropix_jax.{COMMANDS[name][0]}")
        options = getattr(module, "Arguments", None)
        prog = f"entropix-jax {name}"
        return int(module.run(parse(options, arguments, prog) if options else arguments))
    if name == "--version":
        print(f"entropix-jax {__version__}")
        return 0
    if name in ("", "-h", "--help"):
        print("usage: entropix-jax COMMAND [OPTIONS]\n")
        width = shutil.get_terminal_size().columns
        for command, (_, purpose) in COMMANDS.items():
            line = f"  {command:<10} {purpose}"
            print(textwrap.fill(line, width, subsequent_indent=" " * 13))
        print("\nentropix-jax COMMAND --help lists the options of a command.")
        return 0 if name else EXIT_USAGE
    raise UserError(f"no command '{name}'{nearest(name, [*COMMANDS])} (see entropix-jax --help)")


def program() -> NoReturn:
    """Runs the command line of the process, and exits, even if a program is still compiled."""
    status = main()
    if threading.active_count() > 1:
        os._exit(status)  # nothing else ends the compiler
    sys.exit(status)


if __name__ == "__main__":
    program()
