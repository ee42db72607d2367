"""`python -m entropix_jax.calibrate`: quantile tables of a model's own answers."""

from entropix_jax.__main__ import run_module

if __name__ == "__main__":
    run_module("calibrate")
