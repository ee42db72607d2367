"""`python -m entropix_jax.batch`: a file of prompts in, a file of completions out."""

import sys

from entropix_jax.host.interrupts import exit_at_once

exit_at_once()  # Ctrl-C ends the process until there is something to lose.

from entropix_jax.cli.batch import main  # noqa: E402

sys.exit(main())
