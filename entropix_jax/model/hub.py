"""Downloads models from the hub, through its own client. Nothing else is ever downloaded."""

from functools import partial
from pathlib import Path

from entropix_jax.errors import UserError
from entropix_jax.host.files import read_json_object
from entropix_jax.model.checkpoint import INDEX_FILE, SINGLE_FILE
from entropix_jax.model.config_file import CONFIG_FILE
from entropix_jax.model.find import HUB_ID, PART

_TOLD = 8  # files of a repository that an error names
# By name: a repository may have copies for other programs, in other formats and in subfolders.
_FILES = """
    added_tokens.json calibration.json chat_template.jinja config.json generation_config.json
    model.safetensors.index.json special_tokens_map.json tokenizer.json tokenizer.model
    tokenizer_config.json adapter_config.json
""".split()


def snapshot(repo: str, *, revision: str | None = None, folder: Path | None = None) -> Path:
    """Downloads the missing files of a model and returns their path: the configuration and
    tokenizer of `owner/name` and the safetensors in its index, or one file, `owner/name/FILE.gguf`.

    Args:
        revision: a branch, tag or commit; None: the main branch.
        folder: the folder to download to; None: the client's own cache.

    UserError if there is no such repository or file, or it cannot be read.
    """
    if (found := HUB_ID.fullmatch(repo)) is None:
        raise UserError(f"not a hub id: '{repo}' (expected owner/name)")
    if PART.search(repo):
        raise UserError(f"{repo}: is a part of a model: download all parts and merge them")
    from huggingface_hub import errors, hf_hub_download

    try:
        if found[2] is None:
            return _download_folder(repo, revision, folder)
        return Path(hf_hub_download(found[1], found[2], revision=revision, local_dir=folder))
    except errors.RepositoryNotFoundError as error:
        problem = "neither a folder here nor a repository that can be read on the hub"
        if isinstance(error, errors.GatedRepoError):
            problem = "access is restricted; accept its terms on its page, then run 'hf auth login'"
        raise UserError(f"{repo}: {problem}") from None
    except Exception as error:
        # The HTTP client's errors are no OSError.
        if not isinstance(error, OSError | ValueError) and "httpx" not in type(error).__module__:
            raise
        lines = (str(error) or type(error).__name__).split("\n")
        said = " ".join(lines) if isinstance(error, errors.HfHubHTTPError) else lines[0]
        problem = f"no such folder, and not downloaded from the hub: {' '.join(said.split())}"
        raise UserError(f"{repo}: {problem}") from None


def _download_folder(repo: str, revision: str | None, folder: Path | None) -> Path:
    from huggingface_hub import list_repo_files, snapshot_download

    download = partial(snapshot_download, repo, local_dir=folder)
    path = Path(download(revision=revision, allow_patterns=_FILES))
    if not (path / CONFIG_FILE).exists():
        listed = list_repo_files(repo, revision=revision)
        if files := [name for name in listed if name.lower().endswith(".gguf")]:
            problem = f"has GGUF files only: name one, such as {repo}/{files[0]}"
            others = f" (or {', '.join(files[1:_TOLD])})" if files[1:] else ""
            raise UserError(f"{repo}: {problem}{others}")
    # The weights of the same commit, which is the name of a folder in the cache.
    same = path.name if folder is None else revision
    index = path / INDEX_FILE
    weights = [SINGLE_FILE]
    if index.exists():
        weight_map = read_json_object(index).get("weight_map")
        weights = sorted({*map(str, weight_map.values())}) if isinstance(weight_map, dict) else []
    return Path(download(revision=same, allow_patterns=weights))
