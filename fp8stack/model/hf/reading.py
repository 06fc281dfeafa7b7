"""Reads a model's shape from a `config.json` of transformers. A setting that an fp8stack GPT cannot
compute is an error that names the key. Ignored settings that do not affect the logits are noted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import BaseModel

from fp8stack.common import presets
from fp8stack.common.errors import UserError, quoted
from fp8stack.model.config import GPTConfig, Layers, Size
from fp8stack.model.hf.architectures import (
    EXTRA_KEY,
    LAYOUTS,
    ROTARY_KEYS,
    ExpertsLayout,
    Layout,
)

# Keys that do not affect the logits; other unknown keys are noted.
_WITHOUT_EFFECT = {
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "_name_or_path"),
    *("n_ctx", "task_specific_params", "reorder_and_upcast_attn", "pretraining_tp"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "max_window_layers", "layer_types", "sliding_window"),
    *("use_sliding_window", "rope_scaling", "rope_parameters", "rope_theta", "output_attentions"),
    *("output_hidden_states", "return_dict", "is_encoder_decoder", "chunk_size_feed_forward"),
    *("id2label", "label2id", "problem_type", "add_cross_attention", "scale_attn_weights"),
    *("scale_attn_by_inverse_layer_idx", "partial_rotary_factor", "is_decoder", EXTRA_KEY),
    *("gradient_checkpointing", "attn_implementation", "_attn_implementation"),
    *("output_router_logits", "quantization_config"),
}


class _Extra(BaseModel, frozen=True, extra="forbid", strict=True, allow_inf_nan=False):
    """The keys that fp8stack's export adds."""

    bias: bool = True
    dropout: float | None = None
    router_z: float = 0.0


class _Any(BaseModel, frozen=True, extra="allow", strict=True, allow_inf_nan=False):
    """The keys that all layouts have, with transformers' defaults."""

    vocab_size: int
    initializer_range: float = 0.02
    fp8stack: _Extra = _Extra()


class _Gpt2(_Any):
    n_positions: int = 1024
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    tie_word_embeddings: bool = True


class _Rotary(_Any):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int
    hidden_act: str
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    tie_word_embeddings: bool = False


class _Mixture(_Rotary):
    num_hidden_layers: Layers
    # transformers reads and writes the number under both names.
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.001
    router_jitter_noise: float = 0.0
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] | None = None
    clip_qkv: float | None = None


_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
    "arcee": {"rms_norm_eps": 1e-5},
    "olmoe": {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01},
    "qwen3_moe": {"num_key_value_heads": 4, "num_experts_per_tok": 8, "use_sliding_window": False},
    "mixtral": {
        **{"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 2},
        "rope_theta": 1e6,
    },
}
"""Defaults of transformers that are not those of Llama, by model type."""
_QK_NORM = {"qwen3": True, "qwen3_moe": True, "olmoe": "width"}


@dataclass(frozen=True, kw_only=True)
class HfModel:
    """A transformers model in fp8stack's terms: its shape and layout, and notes for the user."""

    config: GPTConfig
    layout: Layout
    notes: tuple[str, ...]


def model_from_config(table: Mapping[str, Any], where: str) -> HfModel:
    """The model that the contents `table` of a `config.json` at the path `where` describe. Raises a
    UserError that names the key if an fp8stack GPT cannot compute it."""
    kind = table.get("model_type")
    if not isinstance(kind, str) or kind not in LAYOUTS:
        supported = ", ".join(sorted(LAYOUTS))
        quoted_kind = quoted(repr(kind))
        raise UserError(
            f"{where}: model_type = {quoted_kind} is not one of those read here: {supported}."
        )
    layout = LAYOUTS[kind]
    _only(table, where, "is_causal", True)
    if table.get("auto_map") is not None:
        reason = "no code of its own can be read"
        raise UserError(f"{where}: auto_map is set, and {reason}. Save it without.")
    gpt2 = layout.model_type == "gpt2"
    shape, notes = (_gpt2 if gpt2 else _rotary)(dict(table), layout, where)
    config: GPTConfig = presets.parse(GPTConfig, shape, where)
    fields = (_Gpt2 if gpt2 else _Rotary if layout.experts is None else _Mixture).model_fields
    unknown_keys = sorted(table.keys() - fields - _WITHOUT_EFFECT)
    if unknown_keys:
        notes.append(f"{where} has keys that are not known here: {quoted(', '.join(unknown_keys))}")
    return HfModel(config=config, layout=layout, notes=tuple(notes))


def _gpt2(table: dict[str, Any], layout: Layout, where: str) -> tuple[dict[str, Any], list[str]]:
    """The values of `GPTConfig` for GPT-2, and notes."""
    hf_config: _Gpt2 = presets.parse(_Gpt2, table, where)
    shape = {key: getattr(hf_config, hf_key) for key, hf_key in layout.keys.items()}
    for key in ("width", "layers", "heads", "context"):  # GPT2Config takes these as aliases
        _only(table, where, ROTARY_KEYS[key], shape[key])
    _only(table, where, "scale_attn_weights", True)
    _only(table, where, "scale_attn_by_inverse_layer_idx", False)
    _only(table, where, "add_cross_attention", False)
    rates = {hf_config.resid_pdrop, hf_config.embd_pdrop, hf_config.attn_pdrop}
    if len(rates) > 1:
        _refuse(
            where, "attn_pdrop", hf_config.attn_pdrop, "resid_pdrop and embd_pdrop must be the same"
        )
    dropout = rates.pop()
    shape |= {
        "mlp_width": hf_config.n_inner or 4 * hf_config.n_embd,
        "norm": "layernorm",
        "activation": _activation(
            layout, hf_config.activation_function, where, "activation_function"
        ),
        "positions": "learned",
        "bias": hf_config.fp8stack.bias,
        "dropout": dropout,
    }
    remedy = "--set model.dropout=0 trains without"
    notes = [f"dropout {dropout:g}, as in the folder; {remedy}"] if dropout else []
    return shape, notes


def _rotary(table: dict[str, Any], layout: Layout, where: str) -> tuple[dict[str, Any], list[str]]:
    """The values of `GPTConfig` for layouts with RoPE, and notes."""
    table = _DEFAULTS.get(layout.model_type, {}) | table
    hf_config: _Rotary = presets.parse(
        _Rotary if layout.experts is None else _Mixture, table, where
    )
    heads = hf_config.num_attention_heads
    if heads < 1 or (hf_config.head_dim is None and hf_config.hidden_size % heads):
        _refuse(where, "num_attention_heads", heads, "hidden_size must divide")
    may_have_bias = layout.model_type in ("llama", "arcee")
    if not may_have_bias and hf_config.attention_bias:
        reason = f"a model of {layout.model_type} has biases nowhere here"
        _refuse(where, "attention_bias", True, reason)
    if may_have_bias and hf_config.attention_bias != hf_config.mlp_bias:
        _refuse(where, "mlp_bias", hf_config.mlp_bias, "attention_bias must be the same")
    kinds = table.get("layer_types") or []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind != "full_attention":
            _refuse(where, "layer_types", kind, "only full_attention can be read")
    used = table.get("use_sliding_window")
    key = "sliding_window" if used is None else "use_sliding_window"
    if used or (used is None and table.get(key) is not None):
        _refuse(where, key, table[key], "attention has no window here")
    notes = []
    dropout = hf_config.fp8stack.dropout
    if dropout is None and hf_config.attention_dropout:
        notes.append(
            f"attention_dropout {hf_config.attention_dropout:g} of the folder is left out: here it "
            "is not of attention alone; --set model.dropout sets it for all"
        )
    usual_width = hf_config.hidden_size // heads
    head_width = usual_width if hf_config.head_dim is None else hf_config.head_dim
    shape = {key: getattr(hf_config, hf_key) for key, hf_key in layout.keys.items()} | {
        "kv_heads": hf_config.num_key_value_heads or heads,
        "head_width": None if head_width * heads == hf_config.hidden_size else head_width,
        "norm": "rmsnorm",
        "activation": _activation(layout, hf_config.hidden_act, where, "hidden_act"),
        "positions": "rope",
        "rope_theta": _rope_theta(table, where),
        "qk_norm": _QK_NORM.get(layout.model_type, False),
        "dropout": dropout or 0.0,
    }
    if layout.experts is not None and isinstance(hf_config, _Mixture):
        if layout.model_type == "olmoe" and shape["head_width"] is not None:
            _refuse(where, "head_dim", head_width, f"OLMoE has hidden_size / {heads}")
        shape |= _experts(hf_config, layout.experts, where)
        if hf_config.router_jitter_noise:
            noise = f"router_jitter_noise {hf_config.router_jitter_noise:g} of the folder"
            notes.append(f"{noise} is left out: routers have no noise here")
    return shape, notes


def _experts(hf_config: _Mixture, layout: ExpertsLayout, where: str) -> dict[str, Any]:
    """The values of `GPTConfig` that say which blocks have experts, and which experts."""
    counts = {hf_config.num_experts, hf_config.num_local_experts} - {None}
    if len(counts) != 1:
        keys = "num_experts and num_local_experts"
        _refuse(where, layout.count, getattr(hf_config, layout.count), f"{keys} must agree")
    if hf_config.clip_qkv is not None:
        _refuse(
            where, "clip_qkv", hf_config.clip_qkv, "queries, keys and values have no bound here"
        )
    dense_blocks = range(0)
    if layout.has_dense:
        step, listed = hf_config.decoder_sparse_step, set(hf_config.mlp_only_layers or ())
        blocks = range(hf_config.num_hidden_layers)
        dense = [block for block in blocks if block in listed or (block + 1) % step]
        dense_blocks = range(len(dense))
        if dense != list(dense_blocks):
            key = "mlp_only_layers" if step == 1 else "decoder_sparse_step"
            reason = "only blocks at the start may be without experts"
            _refuse(where, key, getattr(hf_config, key), reason)
    experts = {
        "count": counts.pop(),
        "per_token": hf_config.num_experts_per_tok,
        "width": getattr(hf_config, layout.width),
        "first_dense": len(dense_blocks),
        "normalize": hf_config.norm_topk_prob or not layout.has_normalize,
        "balance": hf_config.router_aux_loss_coef,
        "router_z": hf_config.fp8stack.router_z,
    }
    return {"experts": experts, "mlp_width": hf_config.intermediate_size if dense_blocks else None}


def _activation(layout: Layout, name: str, where: str, key: str) -> str:
    names = {hf_name: activation for activation, hf_name in layout.activations.items()}
    if not layout.gated:
        names |= {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in names:
        _refuse(where, key, name, f"of {layout.model_type}, {', '.join(sorted(names))} can be read")
    return names[name]


def _rope_theta(table: Mapping[str, Any], where: str) -> Any:
    """The base of RoPE's angles. Only plain RoPE is supported."""
    theta: Any = table.get("rope_theta")
    # A base in these tables, which transformers 5 writes, overrides the key of transformers 4.
    for key in ("rope_parameters", "rope_scaling"):
        rope = table.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            _refuse(where, key, rope, "it is no table")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            _refuse(where, f"{key}.rope_type", kind, "only default can be read")
        _only(rope, where, "partial_rotary_factor", 1.0, f"{key}.")
        theta = rope.get("rope_theta", theta)
    _only(table, where, "partial_rotary_factor", 1.0)
    if theta is None:
        return 10_000.0
    # JSON may hold an integer, even one that exceeds the range of a float.
    return float(theta) if type(theta) is int and abs(theta) < 2**1023 else theta


def _only(table: Mapping[str, Any], where: str, key: str, value: Any, before: str = "") -> None:
    """Raise an error unless `key` is missing or has its only supported value."""
    if table.get(key) not in (None, value):
        _refuse(where, f"{before}{key}", table[key], f"only {_json(value)} can be read")


def _refuse(where: str, key: str, value: Any, reason: str) -> NoReturn:
    raise UserError(f"{where}: {key} = {quoted(_json(value))}: {reason}.")


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
