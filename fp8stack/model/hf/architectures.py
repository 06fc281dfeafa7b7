"""The architectures of transformers that compute the same as an fp8stack GPT, and their
`config.json`."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from fp8stack.common.errors import UserError
from fp8stack.model.config import Experts, GPTConfig

EXTRA_KEY = "fp8stack"
"""Key of `config.json` for settings that have no key in the layout. transformers preserves it."""

GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu2": "relu2"}
ARCEE_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}
GATED_ACTIVATIONS = {"swiglu": "silu", "relu2": "relu"}
"""relu(x)^2 = relu(x) x, a gated MLP with ReLU whose gate and value have the same weights."""


@dataclass(frozen=True, kw_only=True)
class ExpertsLayout:
    """The mixture of experts of an architecture: its names in a block and in `config.json`."""

    module: str  # has the router, `gate`, and `experts.0`, `experts.1` and so on
    linears: tuple[str, str, str]  # of an expert: gate, value, and the one after them
    count: str  # key of the number of experts
    width: str  # key of the inner width of an expert
    has_normalize: bool = True  # whether routing weights need not be normalized
    has_dense: bool = False  # whether some blocks may have no experts


@dataclass(frozen=True)
class Layout:
    """A model architecture of transformers."""

    # As in `config.json`.
    model_type: Literal["gpt2", "llama", "qwen3", "arcee", "olmoe", "qwen3_moe", "mixtral"]
    architecture: str  # the class that generates text
    gated: bool  # whether its MLP is gated
    activations: dict[str, str]  # fp8stack's name of an activation -> transformers'
    # The activation of the published models. Some programs (llama.cpp, CTranslate2) use it
    # without reading the key in `config.json`.
    usual_activation: str
    keys: dict[str, str]  # key of GPTConfig -> key of `config.json`
    experts: ExpertsLayout | None = None


# Keys of GPTConfig whose values are the same in `config.json`, with their names there.
_KEYS = {"vocabulary": "vocab_size", "tied": "tie_word_embeddings", "init_std": "initializer_range"}
GPT2_KEYS = _KEYS | {
    **{"context": "n_positions", "width": "n_embd", "layers": "n_layer", "heads": "n_head"},
    **{"mlp_width": "n_inner", "norm_eps": "layer_norm_epsilon"},
}
ROTARY_KEYS = _KEYS | {
    **{"context": "max_position_embeddings", "width": "hidden_size", "layers": "num_hidden_layers"},
    **{"heads": "num_attention_heads", "kv_heads": "num_key_value_heads"},
    **{"mlp_width": "intermediate_size", "norm_eps": "rms_norm_eps", "bias": "attention_bias"},
}
QWEN3_MOE = ExpertsLayout(
    module="mlp",
    linears=("gate_proj", "up_proj", "down_proj"),
    count="num_experts",
    width="moe_intermediate_size",
    has_dense=True,
)
OLMOE = replace(QWEN3_MOE, width="intermediate_size", has_dense=False)
MIXTRAL = ExpertsLayout(
    module="block_sparse_moe",
    linears=("w1", "w3", "w2"),
    count="num_local_experts",
    width="intermediate_size",
    has_normalize=False,
)
_GATED = (True, GATED_ACTIVATIONS, "swiglu", ROTARY_KEYS)
LAYOUTS: dict[str, Layout] = {
    layout.model_type: layout
    for layout in (
        Layout("gpt2", "GPT2LMHeadModel", False, GPT2_ACTIVATIONS, "gelu_tanh", GPT2_KEYS),
        Layout("llama", "LlamaForCausalLM", *_GATED),
        Layout("qwen3", "Qwen3ForCausalLM", *_GATED),
        Layout("arcee", "ArceeForCausalLM", False, ARCEE_ACTIVATIONS, "relu2", ROTARY_KEYS),
        Layout("olmoe", "OlmoeForCausalLM", *_GATED, OLMOE),
        Layout("qwen3_moe", "Qwen3MoeForCausalLM", *_GATED, QWEN3_MOE),
        Layout("mixtral", "MixtralForCausalLM", *_GATED, MIXTRAL),
    )
}


def layout_of(config: GPTConfig) -> Layout:
    """The layout that computes the same as `config`. Raises a UserError that names the unsupported
    key if there is none."""
    if config.experts is not None:
        return _layout_of_experts(config, config.experts)
    if config.positions == "learned":
        own_width = config.head_width not in (None, config.width // config.heads)
        _require(config, "head_width", not own_width, "GPT-2's heads share the width")
        _require(config, "norm", config.norm == "layernorm", "learned positions go with layernorm")
        _require(config, "activation", not config.gated, "GPT-2's MLP has no gate")
        grouped = config.query_groups != config.heads
        _require(config, "kv_heads", not grouped, "GPT-2 has as many as heads")
        _require(config, "qk_norm", not config.qk_norm, "GPT-2 has none")
        return LAYOUTS["gpt2"]
    _require(config, "norm", config.norm == "rmsnorm", "models with RoPE have rmsnorm")
    gated = config.activation in GATED_ACTIVATIONS
    _require(config, "qk_norm", config.qk_norm != "width", "only OLMoE, of experts, has it")
    if config.qk_norm:
        reason = "with qk_norm the layout is Qwen3's"
        _require(config, "bias", not config.bias, f"{reason}: no bias")
        _require(config, "activation", gated, f"{reason}, whose MLP has a gate")
        return LAYOUTS["qwen3"]
    reason = f"Llama's and Arcee's divides the width, {config.width}"
    _require(config, "heads", config.width % config.heads == 0, reason)
    return LAYOUTS["llama" if config.gated else "arcee"]


def _layout_of_experts(config: GPTConfig, experts: Experts) -> Layout:
    """`layout_of` for a model with experts: `qk_norm` decides between the three."""
    name, key = "Mixtral", "mixtral"
    if config.qk_norm:
        name, key = ("OLMoE", "olmoe") if config.qk_norm == "width" else ("Qwen3-MoE", "qwen3_moe")
    layout = LAYOUTS[key]
    assert layout.experts is not None
    reason = f"with these experts the layout is {name}'s"
    _require(config, "positions", config.positions == "rope", f"{reason}: rope")
    _require(config, "norm", config.norm == "rmsnorm", f"{reason}: rmsnorm")
    _require(config, "bias", not config.bias, f"{reason}: no bias")
    gated = config.activation in GATED_ACTIVATIONS
    _require(config, "activation", gated, f"{reason}, whose experts have a gate")
    if config.qk_norm == "width":
        has_usual_heads = config.heads * config.head_dim == config.width
        _require(config, "head_width", has_usual_heads, f"{reason}: width / heads")
    _require(experts, "shared", not experts.shared, f"{reason}: no shared experts")
    has_dense = not experts.first_dense or layout.experts.has_dense
    _require(experts, "first_dense", has_dense, f"{reason}: experts in every block")
    normalizes = experts.normalize or layout.experts.has_normalize
    _require(experts, "normalize", normalizes, f"{reason}, which normalizes")
    _require(experts, "bias", experts.bias is None, f"{reason}: no biases of experts")
    return layout


def _require(config: GPTConfig | Experts, key: str, holds: bool, reason: str) -> None:
    if not holds:
        value = getattr(config, key)
        key = f"experts.{key}" if isinstance(config, Experts) else key
        text = str(value).lower() if isinstance(value, bool) else value
        raise UserError(
            f"transformers has no model like this one: {key} = {text}, and {reason}. "
            "--format safetensors saves any model."
        )


def config_json(config: GPTConfig, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """The contents of `config.json` for transformers 4.56 and later. `dtype` is "float32" or
    "bfloat16". For errors see `layout_of`."""
    layout = layout_of(config)
    values = dict(config) | {"mlp_width": config.hidden, "kv_heads": config.query_groups}
    table: dict[str, Any] = {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        "dtype": dtype,
        **{hf_key: values[key] for key, hf_key in layout.keys.items()},
        # The defaults of missing keys may exceed this vocabulary.
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "use_cache": True,
    }
    return table | (_gpt2(config) if layout.model_type == "gpt2" else _rotary(config, layout))


_QK_NORMS = {
    True: "a norm of each head's queries and keys, ",
    "width": "a norm of all heads' queries together, and of their keys, ",
}


def reader_notes(config: GPTConfig) -> list[str]:
    """Notes on the operations that a program must support to read the exported model, and a warning
    if some programs compute others. For errors see `layout_of`."""
    layout = layout_of(config)
    table = config_json(config, "float32", None)
    learned = layout.model_type == "gpt2"
    key = "activation_function" if learned else "hidden_act"
    positions = "learned positions" if learned else f"rope_theta {config.rope_theta:g}"
    eps = "layer_norm_epsilon" if learned else "rms_norm_eps"
    experts = config.experts
    notes = [
        f"a program that reads this folder must compute {key} {table[key]}, {positions}, "
        f"{eps} {config.norm_eps:g}, "
        + (_QK_NORMS[config.qk_norm] if config.qk_norm else "")
        + (_of_experts(experts) if experts else "")
        + ("the embedding as the head" if config.tied else "a head that is not the embedding")
        + (", biases" if config.bias and not learned else "")
    ]
    if config.activation != layout.usual_activation:
        usual = layout.activations[layout.usual_activation]
        notes.append(
            f"llama.cpp, CTranslate2 and others compute {usual} in any {layout.model_type} model, "
            f"whatever {key} says: this one, with {table[key]}, they load and compute wrongly. "
            "Load it with transformers"
        )
    normalizes = experts.normalize if experts else None
    if (layout.model_type, normalizes) == ("olmoe", True):
        notes.append(
            "vLLM and llama.cpp do not normalize the weights of experts in any olmoe model, "
            "whatever norm_topk_prob says: this one they load and compute wrongly. Load it with "
            "transformers"
        )
    if (layout.model_type, normalizes) == ("qwen3_moe", False):
        notes.append(
            "llama.cpp normalizes the weights of experts in any qwen3_moe model, whatever "
            "norm_topk_prob says: this one it loads and computes wrongly. Load it with transformers"
        )
    return notes


def _of_experts(experts: Experts) -> str:
    weights = "normalized" if experts.normalize else "not normalized"
    return f"{experts.per_token} of {experts.count} experts with weights that are {weights}, "


def _gpt2(config: GPTConfig) -> dict[str, Any]:
    table: dict[str, Any] = {
        "n_ctx": config.context,  # read by transformers before 5 and llama.cpp
        "activation_function": GPT2_ACTIVATIONS[config.activation],
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }
    return table if config.bias else table | {EXTRA_KEY: {"bias": False}}


def _rotary(config: GPTConfig, layout: Layout) -> dict[str, Any]:
    """The keys of layouts with RoPE that GPT-2 does not have."""
    table: dict[str, Any] = {
        "head_dim": config.head_dim,
        "hidden_act": layout.activations[config.activation],
        # transformers 4 reads the first, 5 the second.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_dropout": config.dropout,
    }
    # Dropout of the embedding and the residual stream has no key in these layouts.
    extra: dict[str, Any] = {"dropout": config.dropout} if config.dropout else {}
    if config.experts is not None and layout.experts is not None:
        table |= _experts(config.experts, layout.experts)
        extra |= {"router_z": config.experts.router_z} if config.experts.router_z else {}
    elif layout.model_type != "qwen3":
        table["mlp_bias"] = config.bias
    return table | ({EXTRA_KEY: extra} if extra else {})


def _experts(experts: Experts, layout: ExpertsLayout) -> dict[str, Any]:
    """The keys of experts."""
    table: dict[str, Any] = {
        layout.count: experts.count,
        layout.width: experts.width,
        "num_experts_per_tok": experts.per_token,
        "router_aux_loss_coef": experts.balance_coefficient,
    }
    if layout.has_normalize:
        table["norm_topk_prob"] = experts.normalize
    if layout.has_dense:
        table |= {"decoder_sparse_step": 1, "mlp_only_layers": list(range(experts.first_dense))}
    return table
