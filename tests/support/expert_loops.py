"""Experts of transformers' classes in a small model, and the same as a loop of linears."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, INNER, EXPERTS = 40, 24, 4  # no multiples of 16 or 32
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
WIDTHS = ("hidden_size", "moe_hidden_size")
INNER_WIDTHS = ("intermediate_size", "moe_intermediate_size")
OPTIONS: dict[str, Any] = {
    "hidden_act": "silu", "mlp_hidden_act": "relu2", "moe_latent_size": None, "swiglu_alpha": 1.7,
    "swiglu_limit": 0.5, "post_norm_eps": 1e-6,
}  # fmt: skip
# Classes of experts by module; all but the last use transformers' interface.
CLASSES = {
    "MixtralExperts": "mixtral",
    "GptOssExperts": "gpt_oss",  # interleaved, transposed, with biases
    "NemotronHExperts": "nemotron_h",  # without a gate
    "AriaExperts": "aria",  # transposed
    "MuseSparkExperts": "muse_spark",  # with a norm
    "OpenAIPrivacyFilterExperts": "openai_privacy_filter",  # transposed, with biases
    "Llama4TextExperts": "llama4",
}


def experts_of(name: str, width: int = WIDTH, inner: int = INNER) -> Any:
    """A module of experts with random parameters."""
    module = importlib.import_module(
        f"transformers.models.{CLASSES[name]}.modeling_{CLASSES[name]}"
    )
    fields = OPTIONS | dict.fromkeys(COUNTS, EXPERTS)
    fields |= dict.fromkeys(WIDTHS, width) | dict.fromkeys(INNER_WIDTHS, inner)
    from transformers import PreTrainedConfig

    config = PreTrainedConfig(**fields)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    experts = getattr(module, name)(config)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3)
    return experts


class Model(nn.Module):
    """A router, which chooses two experts for each token, and its experts."""

    def __init__(self, experts: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.router = nn.Linear(width, EXPERTS)
        self.experts: Any = experts

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(2, dim=-1)
        if "Llama4" not in type(self.experts).__name__:
            return self.experts(x, index, weights)
        scores = torch.zeros(len(x), EXPERTS).scatter(1, index, weights).to(x.dtype)
        rows = (x * scores.t()[..., None]).flatten(0, 1)
        return self.experts(rows).view(EXPERTS, *x.shape).sum(0)


class Loop(nn.Module):
    """The experts of a module as linears, each at the path of an expert's matrix."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        name = type(experts).__name__
        turned = getattr(experts, "is_transposed", name == "Llama4TextExperts")
        self.keys = [key for key in ("gate_up_proj", "up_proj", "down_proj")
                     if hasattr(experts, key)]  # fmt: skip
        for key in self.keys:
            weights = getattr(experts, key).detach()
            biases = getattr(experts, f"{key}_bias", None)
            linears = nn.ModuleList()
            for number, weight in enumerate(weights):
                matrix = weight.t() if turned else weight
                linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=biases is not None)
                linear.weight = nn.Parameter(matrix.contiguous().clone())
                if biases is not None:
                    linear.bias = nn.Parameter(biases.detach()[number].clone())
                linears.append(linear)
            self.add_module(key, linears)
        self.turned = turned
        self.original = (experts,)  # not a child
        if name == "MuseSparkExperts":
            self.post_expert_norm = experts.post_expert_norm

    def multiply(self, key: str, rows: list[Tensor]) -> list[Tensor]:
        """Each expert's product with its rows."""
        return [linear(x) for linear, x in zip(getattr(self, key), rows, strict=True)]

    def activate(self, products: list[Tensor]) -> list[Tensor]:
        """The activation of all rows at once: vectorized code rounds by the place in memory."""
        (experts,) = self.original
        y = torch.cat(products)
        if self.keys[0] == "up_proj":
            y = experts.act_fn(y)
        elif hasattr(experts, "_apply_gate"):
            y = experts._apply_gate(y)
        else:
            gate, y = y.chunk(2, dim=-1)
            y = experts.act_fn(gate) * y
        return list(y.split([len(x) for x in products]))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        chosen = [torch.where(index == number) for number in range(EXPERTS)]  # tokens in order
        rows = [x[tokens] for tokens, _ in chosen]
        products = self.activate(self.multiply(self.keys[0], rows))
        y = torch.cat(self.multiply(self.keys[1], products))
        if hasattr(self, "post_expert_norm"):
            y = self.post_expert_norm(y)
        tokens, places = (torch.cat(numbers) for numbers in zip(*chosen, strict=True))
        outputs = x.new_zeros(*index.shape, x.shape[-1]).index_put((tokens, places), y)
        return (outputs * weights[..., None]).sum(dim=1).to(x.dtype)


class Llama4Loop(Loop):
    """Each expert takes all tokens."""

    def forward(self, rows: Tensor) -> Tensor:  # type: ignore[override]
        products = self.multiply(self.keys[0], list(rows.view(EXPERTS, -1, rows.shape[-1])))
        return torch.cat(self.multiply(self.keys[1], self.activate(products)))


def pair(name: str, width: int = WIDTH, inner: int = INNER) -> tuple[Model, Model]:
    """A model with experts of a class, and one with the same experts as a loop of linears."""
    loop = Llama4Loop if name.startswith("Llama4") else Loop
    experts, original = (experts_of(name, width, inner) for _ in range(2))
    return Model(experts, width), Model(loop(original), width)
