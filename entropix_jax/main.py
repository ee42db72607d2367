"""`python -m entropix_jax.main`, the same as `entropix-jax generate`."""

from entropix_jax.__main__ import run_module

if __name__ == "__main__":
    run_module("generate")
