"""Batch generation: `records` reads the input, `run` drives the engine, `output` keeps the results,
`sidecar` says whose they are, `merge` joins the outputs of several hosts. `storage` opens files on
disk and in object stores."""
