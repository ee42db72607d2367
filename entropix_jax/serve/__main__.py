"""`python -m entropix_jax.serve`: a server with the OpenAI API."""

from entropix_jax.__main__ import run_module

if __name__ == "__main__":
    run_module("serve")
