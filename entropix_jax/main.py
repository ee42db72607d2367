"""`python -m entropix_jax.main`, the same as `entropix-jax generate`."""

import sys

from entropix_jax.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "generate")
    sys.exit(main())
