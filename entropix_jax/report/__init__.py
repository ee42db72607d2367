"""A run as one HTML page, made from its trace: `python -m entropix_jax.report TRACE`.

Host side alone: nothing here imports JAX, so that a page of a finished run is there at once.
`reading` reads traces, `shapes` tells what is wrong with a file, `embedding` packs what a page
carries, `page` puts pages together from `templates/` and the style sheets and scripts in `static/`.
"""

from entropix_jax.report.command import main

__all__ = ["main"]
