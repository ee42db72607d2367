"""Runs `python -m entropix_jax.report`."""

import sys

from entropix_jax.interrupts import exit_at_once

exit_at_once()  # before the imports, which take a while

from entropix_jax.report.command import main  # noqa: E402

sys.exit(main())
