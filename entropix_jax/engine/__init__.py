"""Where model and sampler meet: the compiled decode loop, rows, results, traces."""
