"""`python -m entropix_jax.report`: traces as a page."""

from entropix_jax.__main__ import run_module

if __name__ == "__main__":
    run_module("report")
