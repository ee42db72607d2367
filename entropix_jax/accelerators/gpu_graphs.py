"""CUDA graphs: a GPU runs a call with a loop as one graph, without the host in the loop."""

import os

import jax

_OPTION = "xla_gpu_enable_command_buffer"
# For `jax.jit`. All but WHILE is in a graph anyway.
LOOPS_IN_GRAPHS = {
    _OPTION: "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}


def puts_loops_in_graphs() -> bool:
    """Returns whether the default device is a GPU, and `XLA_FLAGS` does not set the option."""
    return jax.default_backend() == "gpu" and _OPTION not in os.environ.get("XLA_FLAGS", "")
