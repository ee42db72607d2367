"""Batch generation: `records` reads the input, `run` drives the engine, `output` keeps the results.
`storage` opens files on disk and in object stores."""
