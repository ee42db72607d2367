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
    """Downloads what is missing of the configuration, tokenizer and safetensors of `owner/name` at
    a branch, tag or commit (None: the main branch) to `folder` (None: the client's own cache)."""
    if not is_hub_id(repo):
        raise UserError(f"no hub id: '{repo}' (it has the form owner/name)")
    from huggingface_hub import errors, snapshot_download

    try:
        files = snapshot_download(repo, revision=revision, local_dir=folder, allow_patterns=_FILES)
        return Path(files)
    except errors.GatedRepoError:
        told = "access is restricted; accept its terms on its page, then run 'hf auth login'"
        raise UserError(f"{repo}: {told}") from None
    except errors.RepositoryNotFoundError:
        told = "neither a folder here nor a repository that can be read on the hub"
        raise UserError(f"{repo}: {told}") from None
    except Exception as error:
        # The HTTP client's errors are no OSError.
        if not isinstance(error, OSError | ValueError) and "httpx" not in type(error).__module__:
            raise
        lines = (str(error) or type(error).__name__).split("\n")
        said = " ".join(lines) if isinstance(error, errors.HfHubHTTPError) else lines[0]
        told = f"no such folder, and not downloaded from the hub: {' '.join(said.split())}"
        raise UserError(f"{repo}: {told}") from None
