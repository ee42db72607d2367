"""`python -m entropix_jax.chat`: a chat in the terminal."""

from entropix_jax.__main__ import run_module

if __name__ == "__main__":
    run_module("chat")
