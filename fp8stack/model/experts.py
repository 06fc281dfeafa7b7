"""Find the experts of a mixture, and the linears that choose them, in any model."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

_EXPERT = re.compile(r"expert|moe|mixture", re.IGNORECASE)
_NUMBERED = re.compile(r"(experts?_?)?\d+")

# Words in the names of linears that choose experts; elsewhere a gate belongs to an MLP.
_ROUTER_WORDS = {"gate", "gating", "router", "routing", "route", "switch", "wg", "noise"}
_PROJECTION = {"proj", "up", "down"}
_COUNTS = ("num_experts", "n_experts", "num_local_experts", "moe_num_experts", "n_routed_experts")
_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "num_selected_experts",
    "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "top_k", "topk",
)  # fmt: skip


class ExpertModule(NamedTuple):
    """A module that holds experts.

    Attributes:
        path: its module path.
        experts: the names of its children that are experts.
        counts: the number of experts; several numbers if some experts may not be computed.
        per_token: the number of experts that a token goes to; None if unknown.
    """

    path: str
    experts: frozenset[str]
    counts: frozenset[int]
    per_token: int | None

    @property
    def active(self) -> float | None:
        """The share of the experts that a token goes to; None if unknown."""
        return None if self.per_token is None else min(1.0, self.per_token / min(self.counts))

    def holds(self, path: str) -> bool:
        """Whether a layer or parameter at a path is in one of the experts."""
        prefix = f"{self.path}." if self.path else ""
        if not path.startswith(prefix):
            return False
        child = path[len(prefix) :].partition(".")[0]
        return child in self.experts


def find_mixtures(model: nn.Module) -> list[ExpertModule]:
    """Find the mixtures of experts of a model."""
    mixtures: list[ExpertModule] = []
    configs = [c for m in model.modules() if (c := getattr(m, "config", None)) is not None]
    for path, owner in model.named_modules():
        counts = {name: _experts_in(name, child) for name, child in owner.named_children()}
        counts = {name: numbers for name, numbers in counts.items() if numbers}
        hinted = _EXPERT.search(type(owner).__name__) is not None
        counts |= {
            name: {len(parameter)}
            for name, parameter in owner.named_parameters(recurse=False)
            if _is_stack(owner, parameter) and (hinted or _EXPERT.search(name))
        }
        inside = any(mixture.holds(f"{path}.") for mixture in mixtures)
        # A module whose parameters are experts belongs to its parent's mixture.
        if counts and not inside and (path == "" or not _is_experts_of_parent(model, path)):
            numbers = frozenset[int]().union(*counts.values())
            places = [owner, *owner.children(), *configs]
            shared = "shared" in path.rpartition(".")[2]  # a token goes to all of these
            per_token = max(numbers) if shared else _per_token(places, max(numbers))
            mixtures.append(ExpertModule(path, frozenset(counts), numbers, per_token))
    return mixtures


def _is_experts_of_parent(model: nn.Module, path: str) -> bool:
    name = path.rpartition(".")[2]
    return bool(_experts_in(name, model.get_submodule(path)))


def _is_stack(owner: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a parameter may be the stacked matrices of several experts."""
    return (
        not isinstance(owner, _ConvNd)
        and not is_lazy(parameter)
        and parameter.ndim == 3
        and len(parameter) > 1
    )


def _experts_in(name: str, child: nn.Module) -> set[int]:
    """The possible numbers of experts in a child `name`; empty if it holds none."""
    if "shared" in name:
        return set()
    items = {key: item for key, item in child.named_children() if _NUMBERED.fullmatch(key)}
    kinds = {type(item) for item in items.values()}
    if len(kinds) == 1:
        # "Moe" in the class name of a decoder layer does not make a list of layers experts.
        experts = "expert" in f"{name} {type(child).__name__} {kinds.pop().__name__}".lower()
        return {len(items)} if experts else set()
    counts: set[int] = set()
    if _EXPERT.search(name) or _EXPERT.search(type(child).__name__):
        parameters = child.parameters(recurse=False)
        counts = {len(parameter) for parameter in parameters if _is_stack(child, parameter)}
    has_linears = any(isinstance(module, nn.Linear) for module in child.modules())
    if not counts and not has_linears and "expert" in name.lower():
        numbers = (getattr(module, key, None) for module in child.modules() for key in _COUNTS)
        counts = {number for number in numbers if isinstance(number, int) and number > 1}
    return counts


def _per_token(places: Collection[object], count: int) -> int | None:
    for place in places:
        for key in _PER_TOKEN:
            number = getattr(place, key, None)
            if isinstance(number, int) and 0 < number <= count:
                return number
    return None


def find_routers(
    model: nn.Module,
    linears: Mapping[str, tuple[int, int]],
    mixtures: Collection[ExpertModule],
) -> set[str]:
    """Find the linears that choose experts or weigh a shared one.

    A router is recognized by its name, by an output per expert of its mixture, or by float32
    weights in a mixture of a model in half precision.

    Args:
        model: any model.
        linears: its linears, (in, out) by module path.
        mixtures: its mixtures, from `find_mixtures`.
    """
    routers = {path for path in linears if _named_router(path)}
    declared = _declared_float32(model, linears)
    for mixture in mixtures:
        inside = {path for path in _below(mixture.path, linears) if not mixture.holds(path)}
        routers |= _chosen(linears, mixture, inside)
        routers |= declared & inside
        above = mixture.path.rpartition(".")[0]
        routers |= {
            path
            for path in linears
            if path.rpartition(".")[0] == above
            and linears[path][1] in mixture.counts
            and _has_router_word(path.rpartition(".")[2])
        }
    return routers


def _below(path: str, linears: Mapping[str, object]) -> Iterator[str]:
    prefix = f"{path}." if path else ""
    return (name for name in linears if name.startswith(prefix))


def _named_router(path: str) -> bool:
    """Whether the path of a layer is enough to know that it is a router."""
    keys = path.split(".")
    if "router" in keys or path.endswith("gate.wg"):
        return True
    return re.fullmatch(r"shared_experts?_(gate|gating)", keys[-1]) is not None


def _has_router_word(name: str) -> bool:
    words = set(re.split(r"[_\d]+", name.lower()))
    return bool(words & _ROUTER_WORDS or "rout" in name) and not words & _PROJECTION


def _chosen(
    linears: Mapping[str, tuple[int, int]], mixture: ExpertModule, inside: set[str]
) -> set[str]:
    """Find the routers among a mixture's linears outside its experts, `inside`."""
    start = len(mixture.path) + 1 if mixture.path else 0
    named = set()
    for path in inside:
        child, *deeper = path[start:].split(".")
        if _has_router_word(child) and (deeper or linears[path][1] in (1, *mixture.counts)):
            named.add(path)
    # Another projection may have as many outputs by chance, so names come first.
    wide = {path for path in inside if linears[path][1] in mixture.counts}
    return named if named & wide else named | wide


def _declared_float32(model: nn.Module, linears: Mapping[str, tuple[int, int]]) -> set[str]:
    """The linears with float32 weights, if most weights of the model's linears are not float32."""
    weights = {path: model.get_submodule(path)._parameters.get("weight") for path in linears}
    float32 = {path for path, w in weights.items() if w is not None and w.dtype == torch.float32}
    sizes = {path: math.prod(shape) for path, shape in linears.items()}
    return float32 if 2 * sum(sizes[path] for path in float32) < sum(sizes.values()) else set()


class Beside(NamedTuple):
    """Weights that a model multiplies with outside its linears.

    Attributes:
        work: multiplications per token in a forward pass.
        sentence: a description for the plan; "" if they are few.
    """

    work: float
    sentence: str


def matrices_beside(
    model: nn.Module, sizes: Mapping[str, int], mixtures: Collection[ExpertModule]
) -> Beside:
    """Find the matrices outside layers: experts in one 3-D parameter, and 2-D parameters with
    "weight" in their name, such as in `nn.LSTM` or in routers without a linear. Embeddings and
    convolutions do not count.

    Args:
        model: any model.
        sizes: the elements of the weights of its layers, by the path of a linear, or of the
            parameter that has experts.
        mixtures: its mixtures, from `find_mixtures`.
    """
    elements = {}
    work = 0.0
    for path, _, parameter, mixture in _matrices_outside(model, sizes, mixtures):
        elements[path] = parameter.numel()
        work += parameter.numel() * (1.0 if mixture is None else mixture.active or 1.0)
    count, of_layers = sum(elements.values()), sum(sizes.values())
    if not elements or 10 * count < of_layers:
        return Beside(work, "")
    largest = max(elements, key=lambda path: elements[path])
    shape = list(model.get_parameter(largest).shape)
    kind = ", matrices in one tensor, as experts are" if len(shape) == 3 else ""
    return Beside(
        work,
        f"weights outside linear layers are not in FP8: {count:,} elements beside {of_layers:,} "
        f"in linears, the most of them in {largest} {shape}{kind}",
    )


def unknown_layouts(
    model: nn.Module, layers: Collection[str], mixtures: Collection[ExpertModule]
) -> list[str]:
    """A sentence for each class of modules with experts that are in none of the `layers`."""
    paths: dict[str, dict[str, None]] = {}
    for path, owner, _, mixture in _matrices_outside(model, layers, mixtures):
        if mixture is not None:
            place = path.rpartition(".")[0] or path
            paths.setdefault(type(owner).__name__, {})[place] = None
    return [
        f"{first}{f' and {len(further)} more' if further else ''}: unchanged, the layout of the "
        f"experts in a {name} is unknown"
        for name, (first, *further) in paths.items()
    ]


def _matrices_outside(
    model: nn.Module, layers: Collection[str], mixtures: Collection[ExpertModule]
) -> Iterator[tuple[str, nn.Module, nn.Parameter, ExpertModule | None]]:
    """The matrices outside layers: path, module, parameter, and the mixture that it belongs to."""
    for path, owner in model.named_modules():
        if isinstance(owner, nn.Embedding | _ConvNd) or path in layers:
            continue
        for key, parameter in owner.named_parameters(prefix=path, recurse=False):
            mixture = next((mixture for mixture in mixtures if mixture.holds(key)), None)
            if key in layers or is_lazy(parameter):
                continue
            if _multiplies(key, owner, parameter, mixture):
                yield key, owner, parameter, mixture


def _multiplies(
    path: str, owner: nn.Module, parameter: nn.Parameter, mixture: ExpertModule | None
) -> bool:
    """Whether a parameter outside linears is used as one or several matrices, judged by its shape
    and name."""
    name = path.rpartition(".")[2]
    if "bias" in name or "embed" in name or "pos" in name.split("_"):
        return False
    if mixture is not None:
        return parameter.ndim > 1
    if parameter.ndim == 2:
        return "weight" in name or "proj" in name
    return _is_stack(owner, parameter)
