"""Model repositories on the Hugging Face Hub. The only file that imports huggingface_hub."""

import errno
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8stack.errors import UserError, quoted
from fp8stack.hf.folder import HF, INDEX, WEIGHTS
from fp8stack.io import storage_errors
from fp8stack.terminal import is_terminal, warn
from fp8stack.tokenizer import TOKENIZER_FILE

LOG_IN = "run `hf auth login` (`huggingface-cli login` in older versions) or set HF_TOKEN"

# `consolidated` is a second copy of the weights, under the original authors' names.
_WANTED = ("config.json", TOKENIZER_FILE, "*.safetensors.index.json", "*.safetensors")
_UNWANTED = ("*/*", "consolidated*")
# Weights of an earlier push, which a reader would mix with the new ones.
_REPLACED = (WEIGHTS, INDEX, "model-?????-of-?????.safetensors")
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


def repository_in(name: str) -> Repository | None:
    """The repository in `hf:owner/name[@revision]`; None if `name` has another form, or is a path
    that exists.

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
    cache. A line on stderr says what is downloaded. Returns their folder, in the cache of
    huggingface_hub, and the repository at the commit that they are of.

    Raises:
        UserError: huggingface_hub is missing; the repository or revision does not exist, is gated,
            or has no safetensors; or the Hub cannot be reached and the cache has no copy.
        StorageError: the disk is full or the cache cannot be written.
    """
    hub = _hub(str(repository))
    name, revision = repository.name, repository.revision
    patterns: dict[str, Any] = {"allow_patterns": _WANTED, "ignore_patterns": _UNWANTED}
    refusals = hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError
    try:
        try:
            info = hub.HfApi().model_info(name, revision=revision, files_metadata=True)
        except (hub.errors.HFValidationError, *refusals):
            raise
        except Exception:  # without a network, use the cache
            path = hub.snapshot_download(name, revision=revision, local_files_only=True, **patterns)
        else:
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
            wanted = list(hub.utils.filter_repo_objects(sizes, **patterns))
            _require_files(repository, sizes, wanted)
            cached = hub.try_to_load_from_cache
            new = [f for f in wanted if not isinstance(cached(name, f, revision=info.sha), str)]
            if new and os.environ.get("LOCAL_RANK", "0") == "0":
                size = f"{sum(sizes[file] for file in new) / 1e6:,.1f} MB"
                files = "1 file" if len(new) == 1 else f"{len(new)} files"
                warn(f"fetching {repository}: {files}, {size}")
            path = hub.snapshot_download(name, revision=revision, **patterns)
    except UserError:
        raise
    except Exception as error:  # any error of the network or the Hub
        if isinstance(error, OSError) and error.errno in _STORAGE:
            with storage_errors(Path(error.filename or hub.constants.HF_HUB_CACHE)):
                raise
        raise _refused(hub, repository, error) from error
    return Path(path), Repository(name=name, revision=Path(path).name)


def push(folder: Path, name: str, *, private: bool, message: str) -> str:
    """Upload the files of `folder` to the model `name` in one commit, and return its address. A
    missing repository is created, private if `private`. The commit also removes weights that are in
    the repository but not in the folder. Raises a UserError if there is no token, or if the Hub
    refuses or cannot be reached; the folder stays."""
    hub = _hub("--push")
    kept = f"{quoted(str(folder))} is written, but not pushed to {name}"
    again = "give the same command with --overwrite"
    if hub.get_token() is None:
        raise UserError(
            f"{kept}: there is no token of the Hub. To give one, {LOG_IN}; then {again}."
        )
    api = hub.HfApi()
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.model_info(name).private:
            raise UserError(
                f"{kept}: it is public already. Make it private at {api.endpoint}/{name}/settings, "
                f"or leave out --private; then {again}."
            )
        more: dict[str, Any] = {"commit_message": message, "delete_patterns": list(_REPLACED)}
        api.upload_folder(repo_id=name, folder_path=str(folder), **more)
    except UserError:
        raise
    except Exception as error:  # any error of the network or the Hub
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise UserError(
                f"{kept}: the token may not write there. To give one that may, {LOG_IN}; then "
                f"{again}."
            ) from error
        raise UserError(
            f"{kept}: {_why(error)}. Check the name and the network; then {again}."
        ) from error
    return f"{api.endpoint}/{name}"


def commit_in_cache(repository: Repository) -> str | None:
    """The commit of a repository's revision when it was last fetched; None if it never was."""
    hub = _hub(str(repository))
    wanted = {"revision": repository.revision, "local_files_only": True}
    try:
        path = hub.snapshot_download(repository.name, allow_patterns=["config.json"], **wanted)
    except Exception:  # it does not exist
        return None
    return Path(path).name


def _hub(wanted_by: str) -> Any:
    """huggingface_hub, without progress bars if stderr is no terminal."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        hint = "Install it: pip install huggingface_hub."
        raise UserError(f"{quoted(wanted_by)} needs huggingface_hub. {hint}") from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry
    hub: Any = huggingface_hub
    if not is_terminal(sys.stderr):
        hub.utils.disable_progress_bars()
    return hub


def _require_files(repository: Repository, there: Iterable[str], wanted: Sequence[str]) -> None:
    """Raise a UserError unless weights and a configuration are among the files `wanted`."""
    if not any(file.endswith(".safetensors") for file in wanted):
        pickle = next((f for f in sorted(there) if f.endswith((".bin", ".pt", ".pth"))), None)
        has = f", only {quoted(pickle)}, which may run code when it is read" if pickle else ""
        raise UserError(
            f"{repository} has no safetensors file{has}. Give a revision or another repository "
            "that has, or a folder that transformers' save_pretrained wrote."
        )
    if "config.json" not in wanted:
        raise UserError(
            f"{repository} has no config.json, so its model is unknown. Give a repository that "
            "transformers' save_pretrained wrote."
        )


def _refused(hub: Any, repository: Repository, error: Exception) -> UserError:
    """The message for an error of `fetch`."""
    name = repository.name
    page = f"{hub.constants.ENDPOINT}/{name}"
    if isinstance(error, hub.errors.GatedRepoError):
        return UserError(f"{repository} is gated. Accept its terms at {page}, then {LOG_IN}.")
    if isinstance(error, (hub.errors.RepositoryNotFoundError, hub.errors.HFValidationError)):
        return UserError(
            f"No folder '{name}' here, and no model '{name}' on the Hugging Face Hub. Check the "
            f"name; if the model is private, {LOG_IN}."
        )
    if isinstance(error, hub.errors.RevisionNotFoundError):
        return UserError(
            f"{HF}{name} has no revision '{repository.revision}'. Give a branch, a tag or a commit "
            f"of {page}."
        )
    return UserError(
        f"No folder '{repository.name}' here, and {repository} cannot be fetched: {_why(error)}. "
        f"Check the network, or fetch it elsewhere (`hf download {name}`) and give its folder."
    )


def _why(error: Exception) -> str:
    """An error and its causes in one line."""
    text = " ".join(str(error.__context__ or error).split()) or type(error).__name__
    return quoted(text).rstrip(".")
