"""A batch: its input records, their run through the engine, and its output, which grows and is
resumed.

`source` reads records, `ahead` before they are needed; `run` runs them, and `progress` says how far
it is. `store` is the output: `sinks` says where it lies, `lines` reads it back, `identity` tells
whose it is, `index` what is done. `merging` joins the parts of several hosts; `places` opens files
here and behind URLs.
"""
