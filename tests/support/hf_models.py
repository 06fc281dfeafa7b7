"""Small random models for the tests of Hugging Face folders, of fp8stack and of transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8stack import GPT, GPTConfig
from fp8stack.model.config import PADDED
from fp8stack.trained.export.format_files import ModelSource, hf_files
from fp8stack.trained.export.writing import replace_folder

BASE: dict[str, Any] = {"vocabulary": 50, "context": 64, "layers": 2, "width": 32, "heads": 4}
ROPE = BASE | {"norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False}
EXPERTS = {"count": 6, "per_token": 2, "width": 24, "normalize": False, "router_z": 0.5}

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": BASE,
    "gpt2 untied": BASE | {"tied": False, "mlp_width": 48},
    "gpt2 without bias": BASE | {"bias": False},
    "gpt2 gelu": BASE | {"activation": "gelu", "norm_eps": 1e-3},
    "llama": ROPE | {"activation": "swiglu", "mlp_width": 48, "kv_heads": 2, "rope_theta": 5e5},
    "llama tied": ROPE | {"activation": "swiglu", "tied": True, "norm_eps": 1e-2},
    "llama with bias": ROPE | {"activation": "swiglu", "bias": True, "dropout": 0.25},
    "arcee": ROPE | {"activation": "relu2", "kv_heads": 1, "bias": True},
    "arcee gelu": ROPE | {"activation": "gelu"},
    "qwen3": ROPE | {"activation": "swiglu", "qk_norm": True, "kv_heads": 2},
    "qwen3 relu2": ROPE | {"activation": "relu2", "qk_norm": True, "norm_eps": 1e-3},
    "olmoe": ROPE | {"activation": "swiglu", "qk_norm": "width", "experts": EXPERTS},
    "qwen3_moe": ROPE
    | {"activation": "swiglu", "qk_norm": True, "kv_heads": 2, "head_width": 16}
    | {"experts": EXPERTS | {"first_dense": 1, "balance": 0.02}},
    "mixtral": ROPE
    | {"activation": "swiglu", "kv_heads": 2, "tied": True}
    | {"experts": EXPERTS | {"normalize": True}},
}
LAYOUT = {name: name.split()[0] for name in SHAPES}


def random_model(config: GPTConfig, seed: int = 0) -> GPT:
    """A model whose every parameter is random: norms and biases, which begin as ones and zeros,
    would hide that they are lost or exchanged."""
    model = GPT(config, seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator)
            parameter.add_(noise if "norm" in name or name.endswith("bias") else noise * 0.5)
    return model


def weights_of(model: GPT) -> dict[str, Tensor]:
    """The weights of a checkpoint: without the rows that pad the vocabulary."""
    rows = model.config.vocabulary
    return {
        name: parameter.data[:rows] if name in PADDED else parameter.data
        for name, parameter in model.named_parameters()
    }


def source_of(model: GPT, **changes: Any) -> ModelSource:
    """A model as if it had come out of a checkpoint of a run in fp32."""
    recipe = {"name": "fp32", "scaling": "none", "compute_dtype": "fp32"}
    layers = [{"name": name, "fp8": False} for name in model.config.linear_shapes()]
    fields: dict[str, Any] = {
        "path": Path("run/checkpoints/step-000001"),
        "step": 1,
        "config": model.config,
        "weights": weights_of(model),
        "plan": {"recipe": recipe, "layers": layers},
        "fp8": {},
        "dtype": torch.float32,
        "notes": (),
    }
    return ModelSource(**(fields | changes))


def export_to(folder: Path, model: GPT) -> Path:
    replace_folder(folder, hf_files(source_of(model), None))
    return folder


def tokens(vocabulary: int, count: int = 64, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (2, count), generator=generator)


def loaded(folder: Path, **options: Any) -> Any:
    """The model that transformers loads from a folder; a missing or unused tensor fails."""
    import transformers

    model_and_info: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    model, info = model_and_info
    if "quantization_config" in options:  # weights alone are read
        info["unexpected_keys"] = {
            name for name in info["unexpected_keys"] if not name.endswith(".input_scale")
        }
    assert not any(info.values()), info
    return model.eval()


def logits(model: Any, tokens_BT: Tensor) -> Tensor:
    """The logits of a model of fp8stack or of transformers."""
    with torch.no_grad():
        output = model(tokens_BT)
    return output if isinstance(output, Tensor) else output.logits


def require_same_logits(model: GPT, hf_model: Any, atol: float = 1e-5) -> None:
    x = tokens(model.config.vocabulary)
    torch.testing.assert_close(logits(hf_model, x), logits(model, x), rtol=0, atol=atol)


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Move every parameter of a model of transformers off its initial value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator))


def config_json(folder: Path, **changes: Any) -> None:
    """Change keys of a folder's config.json; None removes a key."""
    table = json.loads((folder / "config.json").read_text()) | changes
    table = {key: value for key, value in table.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(table))
