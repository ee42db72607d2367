"""Which code this is: the version, and the commit. Apart, so that what the package exports can name
it."""

import shutil
import subprocess
from pathlib import Path

__version__ = "0.1.0"


def checked_out_commit() -> str | None:
    """The commit of the repository that the package is run from, `-dirty` where files that Git
    knows have been changed since. None elsewhere, or without Git."""
    root = Path(__file__).parent.parent
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    about = ["describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(
            [git, "--no-optional-locks", "-C", str(root), *about],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):  # no reason to lose what it is told of
        return None
    return found.stdout.strip() or None
