"""`python -m entropix_jax.inspect`: the uncertainty of a given text."""

from entropix_jax.__main__ import run_module

if __name__ == "__main__":
    run_module("inspect")
