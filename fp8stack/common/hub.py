"""Model repositories on the Hugging Face Hub. The only file that imports huggingface_hub."""

import errno
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8stack.common.errors import UserError, quoted, require
from fp8stack.common.io import storage_errors
from fp8stack.common.terminal import is_terminal

HF = "hf:"  # prefix of a transformers folder or Hub repository, where a run is accepted too

# Names of files in transformers' folders.
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
SPECIAL_TOKENS = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"

LOG_IN = "run `hf auth login` (`huggingface-cli login` in older versions) or set HF_TOKEN"

# `consolidated*` files hold the weights a second time, under the original authors' names.
_TOKENIZER = [TOKENIZER_FILE, SPECIAL_TOKENS, "tokenizer_config.json"]
_USAGE = ["generation_config.json", CHAT_TEMPLATE]
_FILES: dict[str, Any] = {
    "allow_patterns": [
        *("config.json", *_TOKENIZER, *_USAGE, "*.safetensors.index.json", "*.safetensors")
    ],
    "ignore_patterns": ["*/*", "consolidated*"],
}
# Weights of an earlier push, which a reader would mix with the new weights.
_REPLACED = [WEIGHTS, INDEX, "model-?????-of-?????.safetensors"]
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)
_NAME = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)
_REVISION = re.compile(r"\w[\w./-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A model repository, `owner/name`, and the requested branch, tag or commit."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{HF}{self.name}" + (f"@{self.revision}" if self.revision else "")


def path_in(name: str) -> Path | None:
    """The path in `hf:PATH`; None without this prefix. A path that does not exist may be a
    repository on the Hub, see `repository_in`."""
    return Path(name.removeprefix(HF)) if name.startswith(HF) else None


def repository_in(name: str) -> Repository | None:
    """The repository in `hf:owner/name[@revision]`; None if `name` has another form, or if the path
    after `hf:` exists.

    >>> repository_in("hf:Qwen/Qwen3-0.6B@main")
    Repository(name='Qwen/Qwen3-0.6B', revision='main')
    """
    if not name.startswith(HF) or os.path.lexists(name.removeprefix(HF)):
        return None
    owner_and_name, at, revision = name.removeprefix(HF).partition("@")
    if not _NAME.fullmatch(owner_and_name) or (at and not _REVISION.fullmatch(revision)):
        return None
    return Repository(name=owner_and_name, revision=revision or None)


def require_pushable(name: str) -> None:
    """Raise a UserError unless `name` is `owner/name` and huggingface_hub is installed."""
    if not _NAME.fullmatch(name):
        raise UserError(f"--push '{quoted(name)}' is no repository. Give owner/name.")
    _hub("--push")


def fetch(repository: Repository) -> tuple[Path, Repository]:
    """Download the configuration, weights and tokenizer of a repository, unless they are in the
    cache of huggingface_hub.

    Returns:
        The folder of the files, and the repository with their commit as revision.

    Raises:
        UserError: huggingface_hub is missing; the repository or revision does not exist, is gated,
            or has no safetensors; or the Hub cannot be reached and the cache has no copy.
        StorageError: the disk is full or the cache cannot be written.
    """
    hub = _hub(str(repository))
    with _refusals(hub, repository):
        path = Path(hub.snapshot_download(repository.name, revision=repository.revision, **_FILES))
    if not any(path.glob("*.safetensors")):
        raise UserError(
            f"{repository} has no safetensors file; pickled weights are not read. Give a revision "
            "or another repository that has, or a folder that transformers' save_pretrained wrote."
        )
    if not (path / "config.json").exists():
        raise UserError(
            f"{repository} has no config.json, so its model is unknown. Give a repository that "
            "transformers' save_pretrained wrote."
        )
    return path, Repository(name=repository.name, revision=path.name)


def fetch_tokenizer(name: str) -> Path:
    """The folder with the tokenizer of `hf:FOLDER` or `hf:owner/name[@revision]`, downloaded unless
    it is in the cache. Raises a UserError if the repository has none or cannot be reached."""
    repository = repository_in(name)
    if repository is None:
        return path_in(name) or Path(name)
    hub = _hub(str(repository))
    options = {"revision": repository.revision, "allow_patterns": _TOKENIZER}
    with _refusals(hub, repository):
        return Path(hub.snapshot_download(repository.name, **options))


def push(folder: Path, name: str, *, private: bool, message: str) -> str:
    """Upload the files of `folder` to the model `name` in one commit.

    A missing repository is created, private if `private`. The commit also removes weights that are
    in the repository but not in the folder.

    Returns:
        The repository's address.

    Raises:
        UserError: there is no token, or the Hub refuses or cannot be reached. The folder is kept.
    """
    hub = _hub("--push")
    failed = f"{quoted(str(folder))} is written, but not pushed to {name}"
    again = "give the same command with --overwrite"
    if hub.get_token() is None:
        raise UserError(f"{failed}: there is no token. To give one, {LOG_IN}; then {again}.")
    api = hub.HfApi()
    settings = {"repo_id": name, "folder_path": str(folder), "delete_patterns": _REPLACED}
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.model_info(name).private:
            raise UserError(
                f"{failed}: it is public already. Make it private at "
                f"{api.endpoint}/{name}/settings, or leave out --private; then {again}."
            )
        api.upload_folder(**settings, commit_message=message)
    except UserError:
        raise
    except Exception as error:  # any error of the network or the Hub
        cause, remedy = _cause(error), "Check the name and the network"
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            cause, remedy = "the token may not write there", f"To give one that may, {LOG_IN}"
        raise UserError(f"{failed}: {cause}. {remedy}; then {again}.") from error
    return f"{api.endpoint}/{name}"


def folder_in_cache(repository: Repository) -> Path | None:
    """The folder of a repository's revision, named by the commit, in the cache of huggingface_hub;
    None without a download."""
    hub = _hub(str(repository))
    options = {"revision": repository.revision, "local_files_only": True}
    try:
        path = hub.snapshot_download(repository.name, allow_patterns=["config.json"], **options)
    except Exception:  # not in the cache
        return None
    return Path(path)


def _hub(needed_by: str) -> Any:
    """Import huggingface_hub, without progress bars if stderr is not a terminal."""
    require("huggingface_hub", needed_by)
    import huggingface_hub
    import huggingface_hub.errors
    import huggingface_hub.utils

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry
    hub: Any = huggingface_hub
    if not is_terminal(sys.stderr):
        hub.utils.disable_progress_bars()
    return hub


@contextmanager
def _refusals(hub: Any, repository: Repository) -> Iterator[None]:
    """Turn errors of a download into one-line errors with a remedy."""
    name, page = repository.name, f"{hub.constants.ENDPOINT}/{repository.name}"
    try:
        yield
    except hub.errors.GatedRepoError as error:
        text = f"{repository} is gated. Accept its terms at {page}, then {LOG_IN}."
        raise UserError(text) from error
    except (hub.errors.RepositoryNotFoundError, hub.errors.HFValidationError) as error:
        raise UserError(
            f"No folder '{name}' here, and no model '{name}' on the Hugging Face Hub. Check the "
            f"name; if the model is private, {LOG_IN}."
        ) from error
    except hub.errors.RevisionNotFoundError as error:
        raise UserError(
            f"{HF}{name} has no revision '{repository.revision}'. Give a branch, a tag or a commit "
            f"of {page}."
        ) from error
    except Exception as error:  # any error of the network or the Hub
        if isinstance(error, OSError) and error.errno in _STORAGE:
            with storage_errors(Path(error.filename or hub.constants.HF_HUB_CACHE)):
                raise
        raise UserError(
            f"No folder '{name}' here, and {repository} cannot be fetched: {_cause(error)}. Check "
            f"the network, or fetch it elsewhere (`hf download {name}`) and give its folder."
        ) from error


def _cause(error: Exception) -> str:
    """An error and its causes in one line."""
    text = " ".join(str(error.__context__ or error).split()) or type(error).__name__
    return quoted(text).rstrip(".")
