"""`python -m entropix_jax.calibrate`: thresholds that fit a model."""

import sys

from entropix_jax.host.interrupts import exit_at_once

if __name__ == "__main__":
    exit_at_once()  # Ctrl-C ends the process until there is something to lose.

    from entropix_jax.lab.calibrate import main

    sys.exit(main())
