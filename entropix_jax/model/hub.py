"""Downloads of models from the hub, through its own client. Nothing else is ever downloaded."""

import re
from pathlib import Path

from entropix_jax.errors import UserError

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]


def is_hub_id(text: str) -> bool:
    """Whether a text has the form `owner/name`."""
    return _ID.fullmatch(text) is not None


def snapshot(repo: str, *, revision: str | None = None, folder: Path | None = None) -> Path:
    """The folder of a repository's configuration, tokenizer and safetensors; downloads what is
    missing.

    Args:
        repo: `owner/name`.
        revision: a branch, a tag or a commit; None is the main branch.
        folder: the destination; None is the client's own cache.

    Raises:
        UserError: not a hub id, or the hub refuses, cannot be reached, or lacks the repository.
    """
    if not is_hub_id(repo):
        raise UserError(f"no hub id: '{repo}' (it has the form owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(repo, revision=revision, local_dir=folder, allow_patterns=_FILES)
        )
    except GatedRepoError:
        raise UserError(
            f"{repo}: access is restricted; accept its terms on its page, then run 'hf auth login'"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{repo}: neither a folder here nor a repository that can be read on the hub"
        ) from None
    except Exception as error:
        # The HTTP client's errors are no OSError.
        known = isinstance(error, (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError))
        if not known and not type(error).__module__.startswith("httpx"):
            raise
        lines = (str(error) or type(error).__name__).split("\n")
        said = " ".join(lines) if isinstance(error, HfHubHTTPError) else lines[0]
        raise UserError(
            f"{repo}: no such folder, and not downloaded from the hub: {' '.join(said.split())}"
        ) from None
