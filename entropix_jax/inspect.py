"""`python -m entropix_jax.inspect`: the uncertainty of a given text."""

import sys

from entropix_jax.host.interrupts import exit_at_once

if __name__ == "__main__":
    exit_at_once()  # Ctrl-C ends the process until there is something to lose.

    from entropix_jax.cli.inspect import main

    sys.exit(main())
