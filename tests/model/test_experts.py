"""Routers and experts, in models of transformers and in others: no router goes to FP8."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn

from fp8stack import convert, load_recipe, resolve
from tests.model.test_convert import in_fp8, plan_in, replaced
from tests.support.backend_models import CPU

WIDTH, EXPERTS = 64, 4
PLAN = resolve("current", CPU, "emulate")
COMMON: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "moe_intermediate_size": 48,
    "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
          "qk_nope_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": EXPERTS,
          "n_group": 1, "topk_group": 1, "head_dim": 16}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
# Fields of the configuration in addition to COMMON, and the routers that are linears, by class.
FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "MixtralForCausalLM": ({"num_local_experts": EXPERTS}, []),
    "Qwen2MoeForCausalLM": (
        {"num_experts": EXPERTS, "shared_expert_intermediate_size": 48},
        ["mlp.shared_expert_gate"],
    ),
    "HunYuanMoEV1ForCausalLM": (
        {"num_experts": EXPERTS, "moe_topk": 2, **ROPE},
        ["mlp.gate.wg"],
    ),
    "JetMoeForCausalLM": (
        {"num_local_experts": EXPERTS, "kv_channels": 32, "num_key_value_heads": 1},
        ["mlp.router.layer", "self_attention.experts.router.layer"],
    ),
    "AfmoeForCausalLM": (
        {"num_experts": EXPERTS, "num_dense_layers": 1, "n_group": 1, "topk_group": 1},
        ["mlp.router.gate"],
    ),
    "GptOssForCausalLM": ({"num_local_experts": EXPERTS}, []),
    "GraniteMoeForCausalLM": ({"num_local_experts": EXPERTS}, []),
    "DeepseekV3ForCausalLM": (LATENT, []),
    "PhimoeForCausalLM": ({"num_local_experts": EXPERTS}, ["mlp.router"]),
    "Llama4ForCausalLM": (
        {"num_local_experts": EXPERTS, "intermediate_size_mlp": 96, "num_experts_per_tok": 1},
        ["feed_forward.router"],
    ),
    "JambaForCausalLM": (
        {"num_experts": EXPERTS, "use_mamba_kernels": False, "attn_layer_period": 2,
         "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        [],
    ),
    "LongcatFlashForCausalLM": (
        {**LATENT, "num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48,
         "zero_expert_num": 2, "moe_topk": 2},
        ["mlp.router.classifier"],
    ),
    "SwitchTransformersForConditionalGeneration": (
        {"d_model": WIDTH, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2,
         "num_heads": 2, "num_experts": EXPERTS, "num_sparse_encoder_layers": 1,
         "num_sparse_decoder_layers": 1, "decoder_start_token_id": 0},
        ["mlp.router.classifier"],
    ),
    "NllbMoeForConditionalGeneration": (
        {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "num_experts": EXPERTS,
         "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 96,
         "decoder_ffn_dim": 96, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
        ["ffn.router.classifier"],
    ),
    "NemotronHForCausalLM": (
        {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1,
         "layers_block_type": ["attention", "moe"] * 2, "moe_shared_expert_intermediate_size": 48},
        [],
    ),
    "AriaTextForCausalLM": (
        {"moe_num_experts": EXPERTS, "moe_topk": 2, "moe_num_shared_experts": 1},
        [],
    ),
    "DbrxForCausalLM": (
        {"d_model": WIDTH, "n_heads": 2, "n_layers": 1, "max_seq_len": 32,
         "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
         "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": EXPERTS, "moe_top_k": 2,
                        "hidden_size": WIDTH}},
        ["ffn.router.layer"],
    ),
}  # fmt: skip


UNKNOWN = ("JetMoeForCausalLM", "LongcatFlashForCausalLM", "DbrxForCausalLM")
"""Models with experts whose layouts are not known."""


def family(name: str, **options: Any) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    fields = FAMILIES[name][0] | options if name in FAMILIES else options
    common = COMMON if "d_model" not in fields else {"vocab_size": 128, "pad_token_id": 0}
    torch.manual_seed(0)
    model: nn.Module = kind(kind.config_class(**{**common, **fields}))
    return model


@functools.cache
def converted(name: str) -> nn.Module:
    return convert(family(name), PLAN)


def within_blocks(names: list[str] | set[str]) -> set[str]:
    """The names of layers within their blocks."""
    return {re.sub(r"^.*?\.(?:layers|block|blocks)\.\d+\.(?:layer\.\d+\.)?", "", n) for n in names}


@pytest.mark.parametrize("name", FAMILIES)
def test_routers_of_transformers_stay_as_they_are_and_all_else_goes_to_fp8(name):
    model = converted(name)
    layers = plan_in(model).layers
    unquantized = {layer.name for layer in layers if not layer.fp8} - {"lm_head"}
    assert within_blocks(unquantized) == set(FAMILIES[name][1])
    assert not unquantized & set(replaced(model))
    for path in unquantized:
        reason = next(layer.reason for layer in layers if layer.name == path)
        if type(model.get_submodule(path)) is nn.Linear:
            assert reason == "a router: the recipe says router = false"
        else:  # Phimoe's and Llama 4's
            assert "has a forward of its own" in reason
    # Every linear with an output per expert is a router.
    narrow = {la.name for la in layers if la.out_features in (EXPERTS, EXPERTS + 2)}
    assert narrow <= unquantized
    if name not in UNKNOWN:
        quantizable = [layer for layer in layers if layer.name not in {"lm_head", *unquantized}]
        work = sum(layer.work for layer in quantizable) + plan_in(model).work_outside_linears
        assert sum(layer.fp8_work for layer in quantizable) >= 0.99 * work


@pytest.mark.parametrize("name", ["DbrxForCausalLM", "PhimoeForCausalLM"])
def test_a_recipe_may_have_routers_in_fp8(name):
    model = convert(family(name), resolve(load_recipe("current", {"router": True}), CPU, "emulate"))
    unquantized = [la for la in plan_in(model).layers if not la.fp8 and la.name != "lm_head"]
    assert all("has a forward of its own" in layer.reason for layer in unquantized)


@pytest.mark.parametrize(
    ("name", "share", "unit"),
    [
        ("MixtralForCausalLM", 2 / EXPERTS, "FLOPs"),
        ("Llama4ForCausalLM", 1 / EXPERTS, "FLOPs"),
        ("HunYuanMoEV1ForCausalLM", 2 / EXPERTS, "FLOPs"),
        ("NllbMoeForConditionalGeneration", 1, "weights"),  # which says nothing of tokens
    ],
)
def test_the_headline_counts_experts_by_the_tokens_that_they_get(name, share, unit):
    plan = plan_in(converted(name))
    experts = [
        la for la in plan.layers if re.search(r"experts\.", la.name) and "gate" not in la.name
    ]
    assert {layer.active for layer in experts if "shared" not in layer.name} == {share}
    (headline,) = (line for line in plan.summary() if line.startswith("FP8: "))
    assert f"% of GEMM {unit} (" in headline


# Models of others


class Expert(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 48), nn.Linear(width, 48)
        self.down_proj = nn.Linear(48, width)


def experts(count: int = EXPERTS) -> nn.ModuleList:
    return nn.ModuleList(Expert() for _ in range(count))


def block(**children: nn.Module) -> nn.Module:
    mlp = nn.ModuleDict(children)
    attention = nn.ModuleDict({"q": nn.Linear(WIDTH, EXPERTS), "gate": nn.Linear(WIDTH, EXPERTS)})
    return nn.ModuleDict(
        {"layers": nn.ModuleList([nn.ModuleDict({"attn": attention, "mlp": mlp})])}
    )


def linear(outputs: int = EXPERTS, **options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, outputs, **options)


@pytest.mark.parametrize(
    ("children", "routers"),
    [
        ({"gate": linear(), "experts": experts()}, {"gate"}),
        ({"pick": linear(), "experts": experts()}, {"pick"}),
        ({"route": linear(), "noise_linear": linear(), "experts": experts()},
         {"route", "noise_linear"}),
        ({"gate": linear(), "latent": linear(), "experts": experts()}, {"gate"}),
        ({"gate": linear(), "experts": experts(), "shared_expert": nn.ModuleDict(
            {"gate_proj": linear(48), "down_proj": nn.Linear(48, EXPERTS)})}, {"gate"}),
        ({"gate": linear(48), "up": linear(48), "down": nn.Linear(48, WIDTH)}, set()),
        ({"router": linear(3)}, {"router"}),
        ({"shared_expert_gate": linear(1), "gate": linear(), "experts": experts()},
         {"shared_expert_gate", "gate"}),
    ],
)  # fmt: skip
def test_a_router_is_found_by_its_name_or_by_its_width_beside_experts(children, routers):
    plan = plan_in(convert(block(**children), PLAN))
    names = {layer.name for layer in plan.layers if not layer.fp8}
    assert {name.removeprefix("layers.0.mlp.") for name in names} == routers
    for layer in plan.layers:
        if not layer.fp8:
            assert layer.reason == "a router: the recipe says router = false"
            assert f"{layer.name}: unchanged, {layer.reason}" in plan.reasons


def test_a_router_that_is_declared_float32_stays_so_in_a_model_in_bf16():
    def model(dtype: torch.dtype) -> nn.Module:
        mixture = block(experts=experts(), pick=linear(EXPERTS + 3), other=linear(EXPERTS + 3))
        mixture.bfloat16()
        mixture.get_submodule("layers.0.mlp.pick").to(dtype)
        return mixture

    for recipe in ("current", "bf16"):
        declared = convert(model(torch.float32), recipe)
        layers = {layer.name: layer for layer in plan_in(declared).layers}
        pick = declared.get_submodule("layers.0.mlp.pick")
        assert type(pick) is nn.Linear
        assert pick.weight.dtype == torch.float32
        assert layers["layers.0.mlp.pick"].precision == "unchanged"
        assert layers["layers.0.mlp.other"].precision == recipe
    assert in_fp8(convert(model(torch.bfloat16), PLAN)) == [*layers]
    dense = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    dense[1].float()  # as T5 has its `wo`
    assert in_fp8(convert(dense, PLAN)) == ["0", "1"]
