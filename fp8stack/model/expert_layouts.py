"""The layouts of experts whose matrices are stacked in one parameter, [experts, out, in].

transformers' experts declare theirs, as arguments of `use_experts_implementation` in
`transformers.integrations.moe`. Of its other classes, Llama 4's is known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

INTERFACE = "transformers.integrations.moe"
LLAMA4 = ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts")


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


class ExpertWeight(NamedTuple):
    """A parameter that has a matrix for each expert.

    Attributes:
        module: the module of the parameter.
        key: the parameter's name there.
        keys: the names of all its parameters that have something for each expert.
        bias: the name of the biases, [experts, out]; "" without.
        shape: the parameter's shape.
        transposed: whether a matrix is stored as [in, out].
        paths: the parameter's path, which is its name, and the module's; again for each further
            path of the module.
    """

    module: nn.Module
    key: str
    keys: list[str]
    bias: str
    shape: tuple[int, ...]
    transposed: bool
    paths: list[str]

    @property
    def groups(self) -> int:
        """The number of experts."""
        return self.shape[0]

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
        if (kind.__module__, kind.__name__) == LLAMA4 and type(module).forward is kind.forward:
            return ParameterLayout(("gate_up_proj", "down_proj"), transposed=True)
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
            weight.paths.extend([f"{path}.{weight.key}" if path else weight.key, path])
    return [weight for of_module in weights.values() for weight in of_module]


def _weights(module: nn.Module, layout: ParameterLayout) -> list[ExpertWeight]:
    """The weights of a module; none if a parameter has another shape than its layout says."""
    tensors = {key: getattr(module, key, None) for key in layout.keys}
    if layout.has_bias:
        tensors |= {f"{key}_bias": getattr(module, f"{key}_bias", None) for key in layout.keys}
    shapes = {key: tuple(x.shape) for key, x in tensors.items() if isinstance(x, Tensor)}
    if any(len(shapes.get(key, ())) != 3 for key in layout.keys):
        return []
    biases = {key: f"{key}_bias" if layout.has_bias else "" for key in layout.keys}
    weights = [
        ExpertWeight(module, key, [*tensors], biases[key], shapes[key], layout.transposed, [])
        for key in layout.keys
    ]
    consistent = len({weight.groups for weight in weights}) == 1 and all(
        not weight.bias or shapes.get(weight.bias) == (weight.groups, weight.out_features)
        for weight in weights
    )
    return weights if consistent else []
