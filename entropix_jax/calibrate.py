"""`python -m entropix_jax.calibrate`: thresholds that fit a model."""

from entropix_jax.__main__ import run_module

if __name__ == "__main__":
    run_module("calibrate")
