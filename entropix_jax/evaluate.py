"""`python -m entropix_jax.evaluate`: samplers against each other, tuned equally."""

import sys

from entropix_jax.host.interrupts import exit_at_once

if __name__ == "__main__":
    exit_at_once()  # Ctrl-C ends the process until there is something to lose.

    from entropix_jax.lab.evaluate import main

    sys.exit(main())
