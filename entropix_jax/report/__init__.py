"""Traces as HTML pages: `entropix-jax report TRACE --output FILE.html`.

Imports neither JAX nor the engine: a page is made of a finished trace. `reading` reads and checks
traces, `tokens` draws tokens, `page` puts it all together.
"""
