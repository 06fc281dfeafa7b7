"""The layouts of experts whose matrices are stacked in one parameter, [experts, out, in].

transformers' experts declare theirs, as arguments of `use_experts_implementation` in
`transformers.integrations.moe`; of its other classes, those in `_LAYOUTS` are known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

INTERFACE = "transformers.integrations.moe"


class ParameterLayout(NamedTuple):
    """The parameters of a module of experts.

    Attributes:
        keys: their names, in the order of the forward pass.
        transposed: whether a matrix is [in, out].
        has_bias: whether each has a bias [experts, out], whose name ends in "_bias".
    """

    keys: tuple[str, ...]
    transposed: bool = False
    has_bias: bool = False


# transformers' experts that do not use its interface, by module and class.
_LAYOUTS = {
    ("transformers.models.jetmoe.modeling_jetmoe", "JetMoeParallelExperts"): ParameterLayout(
        ("weight",)
    ),
    ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts"): ParameterLayout(
        ("gate_up_proj", "down_proj"), transposed=True
    ),
    (
        "transformers.models.longcat_flash.modeling_longcat_flash",
        "LongcatFlashExperts",
    ): ParameterLayout(("gate_up_proj", "down_proj")),
    ("transformers.models.step3p7.modeling_step3p7", "Step3p7Experts"): ParameterLayout(
        ("gate_up_proj", "down_proj")
    ),
}


class ExpertWeight(NamedTuple):
    """A parameter that has a matrix for each expert.

    Attributes:
        module: the module of the parameter.
        key: the parameter's name there.
        keys: the names of all its parameters that have something for each expert.
        bias: the name of the biases, [experts, out]; "" without.
        groups: the number of experts that are multiplied with.
        shape: the parameter's shape.
        transposed: whether a matrix is stored as [in, out].
        paths: the parameter's path, which is its name, and the module's; again for each further
            place of the module. A parameter called `weight` has the module's path.
    """

    module: nn.Module
    key: str
    keys: list[str]
    bias: str
    groups: int
    shape: tuple[int, ...]
    transposed: bool
    paths: list[str]

    @property
    def in_features(self) -> int:
        """The input features of an expert."""
        return self.shape[1 if self.transposed else 2]

    @property
    def out_features(self) -> int:
        """The output features of an expert."""
        return self.shape[2 if self.transposed else 1]


def uses_interface(module: nn.Module) -> bool:
    """Whether a module of experts dispatches its forward pass by transformers' interface."""
    forward: Any = type(module).forward
    return bool(getattr(forward, "__globals__", {}).get("__name__") == INTERFACE)


def find_layout(module: nn.Module) -> ParameterLayout | None:
    """The layout of a module of experts; None if it is unknown."""
    if uses_interface(module):
        flags = ("has_gate", "has_bias", "is_transposed")
        values = [vars(module).get(flag) for flag in flags]
        if not all(isinstance(value, bool) for value in values):
            return None  # another version of transformers may declare other things
        has_gate, has_bias, transposed = values
        keys = ("gate_up_proj" if has_gate else "up_proj", "down_proj")
        return ParameterLayout(keys, bool(transposed), bool(has_bias))
    kinds: tuple[Any, ...] = type(module).__mro__
    for kind in kinds:
        layout = _LAYOUTS.get((kind.__module__, kind.__name__))
        if layout is not None and type(module).forward is kind.forward:
            return layout
    return None


def find_expert_weights(model: nn.Module) -> list[ExpertWeight]:
    """Find the experts of known layout in a model."""
    weights: dict[int, list[ExpertWeight]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        layout = find_layout(module)
        if layout is None:
            continue
        if id(module) not in weights:
            weights[id(module)] = _weights(module, layout)
        for weight in weights[id(module)]:
            name = f"{path}.{weight.key}" if path else weight.key
            weight.paths.extend([path] if path and weight.key == "weight" else [name, path])
    return [weight for of_module in weights.values() for weight in of_module]


def _weights(module: nn.Module, layout: ParameterLayout) -> list[ExpertWeight]:
    """The weights of a module; none if a parameter has another shape than its layout says."""
    tensors = {key: getattr(module, key, None) for key in layout.keys}
    if layout.has_bias:
        tensors |= {f"{key}_bias": getattr(module, f"{key}_bias", None) for key in layout.keys}
    shapes = {key: tuple(x.shape) for key, x in tensors.items() if isinstance(x, Tensor)}
    if any(len(shapes.get(key, ())) != 3 for key in layout.keys):
        return []
    groups = min(shapes[key][0] for key in layout.keys)  # LongCat's up has more than it uses
    biases = {key: f"{key}_bias" if layout.has_bias else "" for key in layout.keys}
    weights = [
        ExpertWeight(
            module, key, [*tensors], biases[key], groups, shapes[key], layout.transposed, []
        )
        for key in layout.keys
    ]
    consistent = all(
        not weight.bias or shapes.get(weight.bias) == (groups, weight.out_features)
        for weight in weights
    )
    return weights if consistent else []
