"""`python -m entropix_jax`: the installed command, where it is not on the path."""

import sys

from entropix_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
