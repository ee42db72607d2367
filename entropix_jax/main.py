"""`python -m entropix_jax.main`, the same as `entropix-jax generate`."""

import sys

from entropix_jax.__main__ import program

if __name__ == "__main__":
    sys.argv.insert(1, "generate")
    program()
