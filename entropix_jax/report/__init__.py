"""What came of a run as one HTML page: `python -m entropix_jax.report TRACE`.

Host side alone: nothing here imports JAX, so that a page of a finished run is there at once.
`command` is the command line, and `kinds` tells what it was given: a trace, which `reading` reads,
several of one prompt (`comparing`), a batch's output (`records`) or a study's folder (`study`);
`shapes` tells what is wrong with a file. `embedding` packs what a page carries, `page` puts pages
together from `templates/` and the style sheets and scripts in `static/`.
"""

from entropix_jax.report.command import main

__all__ = ["main"]
