"""Models of Hugging Face's transformers, converted in both directions, from the files' formats.
transformers itself is never imported."""

from fp8stack.model.hf.architectures import Layout, config_json, layout_of, reader_notes
from fp8stack.model.hf.loaded_model import scheme_loaded_from
from fp8stack.model.hf.model_folder import ModelFolder, open_folder
from fp8stack.model.hf.reading import HfModel, model_from_config
from fp8stack.model.hf.tensors import HfModule, from_hf, holds, modules_of, to_hf

__all__ = [
    "HfModel",
    "HfModule",
    "Layout",
    "ModelFolder",
    "config_json",
    "from_hf",
    "holds",
    "layout_of",
    "model_from_config",
    "modules_of",
    "open_folder",
    "reader_notes",
    "scheme_loaded_from",
    "to_hf",
]
