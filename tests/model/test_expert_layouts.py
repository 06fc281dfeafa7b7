"""The layouts of experts that `convert` knows, and the reasons that others stay as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8stack import convert
from fp8stack.model.expert_layouts import find_expert_weights
from tests.model.test_convert import in_fp8, plan, plan_in, reason
from tests.support.expert_loops import CLASSES, EXPERTS, INNER, WIDTH, Model, experts_of

UP, DOWN = (EXPERTS, WIDTH, 2 * INNER), (EXPERTS, INNER, WIDTH)


@pytest.mark.parametrize("name", CLASSES)
def test_weights_of_experts_are_found_with_their_sizes(name) -> None:
    weights = find_expert_weights(nn.ModuleDict({"experts": experts_of(name)}))
    inner = INNER if name == "NemotronHExperts" else 2 * INNER
    sizes = [(weight.groups, weight.in_features, weight.out_features) for weight in weights]
    assert sizes == [(EXPERTS, WIDTH, inner), (EXPERTS, INNER, WIDTH)]
    assert [bool(weight.bias) for weight in weights] == ["bias" in " ".join(weights[0].keys)] * 2


class TheirExperts(nn.Module):
    """Experts that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(*UP))
        self.w2 = nn.Parameter(torch.randn(*DOWN))


def without_flag() -> nn.Module:
    experts = experts_of("MixtralExperts")
    del experts.has_gate
    return experts


def with_own_forward(name: str) -> nn.Module:
    experts = experts_of(name)
    kind = type(experts)
    experts.__class__ = type("Inherits", (kind,), {"forward": lambda self, *args: args[0]})
    return experts


def with_odd_bias() -> nn.Module:
    experts = experts_of("GptOssExperts")
    experts.down_proj_bias = nn.Parameter(torch.zeros(EXPERTS, INNER))
    return experts


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (TheirExperts, "TheirExperts"),
        (without_flag, "MixtralExperts"),
        (lambda: with_own_forward("Llama4TextExperts"), "Inherits"),
        (with_odd_bias, "GptOssExperts"),
    ],
)
def test_experts_of_unknown_layout_stay_as_they_are_and_say_so(make, kind) -> None:
    layers = (
        nn.ModuleDict({"other": nn.Linear(WIDTH, WIDTH), "experts": make()}) for _ in range(2)
    )
    model = convert(nn.Sequential(*layers), plan("current"))
    names = ["0.other", "1.other"]
    assert [layer.name for layer in plan_in(model).layers] == names
    assert in_fp8(model) == names
    assert reason(model, "0.experts and 1 more") == (
        f"unchanged, the layout of the experts in a {kind} is unknown"
    )
    assert plan_in(convert(nn.Sequential(make(), nn.Linear(8, 8)), plan("fp32"))).reasons == ()
    outside = [r for r in plan_in(model).reasons if r.startswith("weights outside linear layers")]
    assert len(outside) == 1
    assert not any("linear" in path for path, _ in model.named_modules())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda e: setattr(e, "forward", e.forward), "its module has a forward of its own"),
        (lambda e: setattr(e, "_is_expert_parallel", True),
         "expert parallelism shares its experts out"),
        (lambda e: nn.utils.parametrize.register_parametrization(e, "up_proj", nn.Identity()),
         "up_proj is computed and no parameter"),
        (lambda e: setattr(e, "up_proj", nn.Parameter(e.up_proj.to(torch.float8_e4m3fn))),
         "its weight is quantized already (float8_e4m3fn)"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_converted_say_why(change, expected) -> None:
    model = Model(experts_of("NemotronHExperts"))
    change(model.experts)
    model.add_module("linear", nn.Linear(WIDTH, WIDTH))
    convert(model, plan("current"))
    for name in ("experts.up_proj", "experts.down_proj"):
        assert reason(model, name) == f"unchanged, {expected}"
    assert in_fp8(model) == ["linear"]
    assert model.experts.config._experts_implementation == "grouped_mm"
