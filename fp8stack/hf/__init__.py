"""Models of Hugging Face's transformers, converted in both directions, from the files' formats.
transformers itself is never imported."""

from fp8stack.hf.folder import HF, ModelFolder, open_folder, path_in
from fp8stack.hf.hub import Repository, commit_in_cache, fetch, repository_in
from fp8stack.hf.layouts import Layout, config_json, layout_of, reader_notes
from fp8stack.hf.reading import HfModel, model_from_config
from fp8stack.hf.tensors import HfModule, from_hf, modules_of, to_hf

__all__ = [
    "HF",
    "HfModel",
    "HfModule",
    "Layout",
    "ModelFolder",
    "Repository",
    "commit_in_cache",
    "config_json",
    "fetch",
    "from_hf",
    "layout_of",
    "model_from_config",
    "modules_of",
    "open_folder",
    "path_in",
    "reader_notes",
    "repository_in",
    "to_hf",
]
