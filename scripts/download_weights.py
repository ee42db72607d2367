"""Downloads a model from the hub, over the hub's own client.

    python scripts/download_weights.py OWNER/NAME [--revision REVISION] [--output DIR]

Configuration, tokenizer and safetensors alone, into the client's own cache, or into a folder.
Prints where they are: what `--model` takes. Started again after a cut it fetches what is missing. A
repository whose terms must be accepted needs a token: `hf auth login`, or HF_TOKEN.
"""

import argparse
import sys
from pathlib import Path

from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.host.interrupts import exit_at_once
from entropix_jax.model.hub import snapshot


def main() -> int:
    """Downloads and prints the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repository", metavar="OWNER/NAME")
    parser.add_argument("--revision", help="a branch, a tag or a commit (default: main)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="a folder, not the cache")
    args = parser.parse_args()
    print(snapshot(args.repository, revision=args.revision, folder=args.output))
    return EXIT_OK


if __name__ == "__main__":
    exit_at_once()
    sys.exit(run_command(main))
