"""A folder of quantized weights, run as a server does: the folder's weights to the bit, and inputs
quantized as its `config.json` says."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fp8stack.common import hub, presets
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.layers import build_backend, fp8_state, load_fp8_state
from fp8stack.model import hf
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.model.hf.schemes import stored_schemes
from fp8stack.numerics import inverse
from fp8stack.precision import Hardware, Plan, Recipe, load_recipe
from fp8stack.precision.recipe import LayerRule
from fp8stack.precision.rules import best_plain_dtype
from fp8stack.training.checkpoint.state import restore_weights
from fp8stack.training.load import find_source


def is_folder(recipe: str) -> bool:
    """Whether a recipe is given by a folder of transformers, `hf:...` or a path."""
    named = recipe == "auto" or recipe in presets.names("recipes")
    return recipe.startswith(hub.HF) or (not named and os.path.isdir(recipe))


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedFolder:
    """A folder in its own scheme. As a recipe, linears with quantized inputs have a quantizer for
    them and none for their weight, which is dequantized exactly: `weight` in the folder is rounded
    no second time."""

    name: str  # as the user named it
    shape: GPTConfig
    weights: Mapping[str, Tensor]  # float32, by parameter name
    inputs: Mapping[str, Quantizer | None]  # of each linear, by module path
    input_scales: Mapping[str, Tensor]  # of linears with a fixed scale: float32, of each group

    def plan(self, hardware: Hardware, backend: str) -> Plan:
        """The plan that runs the folder on `hardware`. Raises what `resolve` raises."""
        plan = plan_for(self.shape, self._recipe(hardware), hardware, backend)
        return replace(plan, has_quantized_weights=True)

    def model(self, hardware: Hardware, backend: str) -> GPT:
        """The model in eval mode, on the device of `hardware`."""
        plan = self.plan(hardware, backend)
        model = GPT(self.shape, build_backend(plan))
        restore_weights(model, self.weights)
        if plan.delayed:  # not on a GPU that cannot emulate FP8
            slots = {f"{path}.input.scale": scale for path, scale in self.input_scales.items()}
            load_fp8_state(model, fp8_state(model) | slots)
        return model.to(hardware.device).eval()

    def _recipe(self, hardware: Hardware) -> Recipe:
        quantized = Counter(inputs for inputs in self.inputs.values() if inputs is not None)
        if not quantized:  # weights alone; in the dtype that emulated recipes have
            dtype = "fp32" if hardware.device == "cpu" else best_plain_dtype(hardware)
            return load_recipe(dtype).model_copy(update={"name": self.name})
        (usual, _), *_ = quantized.most_common(1)
        rules = tuple(
            LayerRule(match=path, recipe=self.name, quantizers=_inputs_alone(inputs))
            for path, inputs in self.inputs.items()
            if inputs != usual
        )
        return Recipe(name=self.name, head=True, quantizers=Quantizers(input=usual), layers=rules)


def _inputs_alone(inputs: Quantizer | None) -> Quantizers | None:
    return None if inputs is None else Quantizers(input=inputs)


def served_folder(name: str, shape: GPTConfig) -> ServedFolder:
    """The folder that the user calls `name`, which holds a model of the shape `shape`.

    Raises:
        UserError: the folder cannot be read, holds another model, or has a scheme that is not
            known.
    """
    source = name if name.startswith(hub.HF) else f"{hub.HF}{name}"
    trained = find_source(source)
    if _computation(trained.shape) != _computation(shape):
        raise UserError(
            f"'{quoted(name)}' holds a model of another shape than the one it is compared with. "
            "Give an export of that model."
        )
    repository = hub.repository_in(source)
    path = hub.path_in(source) if repository is None else hub.fetch(repository)[0]
    assert path is not None
    folder = hf.open_folder(Path(path))
    layout = hf.model_from_config(folder.config, str(path)).layout
    schemes = stored_schemes(folder.config, str(folder.path / "config.json"))
    inputs: dict[str, Quantizer | None] = {}
    scales: dict[str, Tensor] = {}
    for linear, modules in hf.modules_of(trained.shape, layout).items():
        paths = [module.path for module in modules if module.path in folder.tensors.schemes]
        kinds = {schemes.inputs_of_module(module) for module in paths}
        if len(kinds) > 1 or 0 < len(paths) < len(modules):
            raise UserError(
                f"{path}: the modules of {linear} ({paths[0]}, ...) are quantized differently, "
                "which no server does. Quantize them alike."
            )
        inputs[linear] = kinds.pop() if kinds else None
        if (quantizer := inputs[linear]) is not None and quantizer.delayed:
            scales[linear] = _input_scales(folder, modules, linear in trained.shape.grouped)
    return ServedFolder(
        name=name, shape=trained.shape, weights=trained.weights, inputs=inputs, input_scales=scales
    )


def _computation(shape: GPTConfig) -> tuple[object, ...]:
    """The facts of a shape that the logits depend on."""
    parameters = shape.parameter_shapes() | {"position_embedding.weight": ()}  # any context
    rotation = shape.rope_theta if shape.positions == "rope" else None
    experts = shape.experts and (shape.experts.per_token, shape.experts.normalize)
    attention = (shape.heads, shape.query_groups, shape.qk_norm, rotation)
    return parameters, shape.norm, shape.norm_eps, shape.activation, attention, experts


def _input_scales(
    folder: hf.ModelFolder, modules: tuple[hf.HfModule, ...], grouped: bool
) -> Tensor:
    """The scales that multiply the inputs of a linear into FP8. Of modules that share their input,
    and of all experts, servers take the largest `input_scale`, which multiplies out. Raises a
    UserError if one is missing or wrong."""
    input_scales = []
    for module in modules:
        tensor = f"{module.path}.input_scale"
        if tensor not in folder.stored:
            raise UserError(
                f"{folder.path}: '{quoted(tensor)}' is missing: config.json says that inputs have "
                "static scales. Give the folder with it."
            )
        input_scales.append(folder.tensors.input_scale(module.path))
    scale = inverse(torch.stack(input_scales).max())
    return scale.repeat(len({module.expert for module in modules})) if grouped else scale
