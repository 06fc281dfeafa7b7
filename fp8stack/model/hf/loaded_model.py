"""The scheme of the folder that transformers loaded a model from, and dequantized."""

from pathlib import Path
from typing import Any

from torch import nn

from fp8stack.common import hub
from fp8stack.common.io import read_json
from fp8stack.model.hf.schemes import stored_schemes


def scheme_loaded_from(module: nn.Module) -> str | None:
    """A sentence on the scheme of the folder or the downloaded repository that `from_pretrained`
    loaded `module` from; None if its weights were not quantized there, or it is gone.

    transformers removes the `quantization_config` from a model that it dequantizes; the name of the
    folder stays.
    """
    config: Any = getattr(module, "config", None)
    name = getattr(config, "_name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    try:
        folder = Path(name)
        repository = hub.repository_in(f"{hub.HF}{name}")
        if repository is not None:
            folder = hub.folder_in_cache(repository) or folder
        where = folder / "config.json"
        table = read_json(where) if where.is_file() else None
        groups = stored_schemes(table, str(where)).groups if isinstance(table, dict) else ()
    except (OSError, ValueError):  # such as a name that is no path; a UserError is a ValueError
        return None
    schemes = [f"{group.scheme}, nearest {group.scheme.nearest_recipe}" for group in groups]
    return f"the weights come from {name}: {'; '.join(dict.fromkeys(schemes))}" if schemes else None
