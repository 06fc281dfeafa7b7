"""Converts weights to transformers' names and shapes, and back."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8stack.errors import UserError, quoted
from fp8stack.hf.folder import Tensors
from fp8stack.hf.layouts import Layout
from fp8stack.model.config import GPTConfig
from fp8stack.precision.hardware import require_free

READABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some rows of one of our linears that form a module of transformers."""

    module: str
    start: int
    rows: int

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a weight or bias, as a new tensor."""
        return tensor[self.start : self.start + self.rows].contiguous().clone()


def parts_of(config: GPTConfig, layout: Layout) -> dict[str, tuple[Part, ...]]:
    """The parts of each of our linears, in order: `{our module path: parts}`."""
    found: dict[str, tuple[Part, ...]] = {}
    for name, (_, outputs) in config.linear_shapes().items():
        if name == "lm_head":
            found[name] = (Part(module="lm_head", start=0, rows=outputs),)
            continue
        _, block, linear = name.split(".", 2)
        stem = f"transformer.h.{block}" if layout.model_type == "gpt2" else f"model.layers.{block}"
        found[name] = tuple(
            Part(module=f"{stem}.{module}", start=start, rows=rows)
            for module, start, rows in _rows(config, layout, outputs)[linear]
        )
    return found


def _rows(config: GPTConfig, layout: Layout, outputs: int) -> dict[str, list[tuple[str, int, int]]]:
    """The modules of each linear of a block: name, first row, and number of rows; `outputs` is the
    number of rows of a linear that is a single module."""
    if layout.model_type == "gpt2":
        return {
            "attention.qkv": [("attn.c_attn", 0, outputs)],
            "attention.output": [("attn.c_proj", 0, outputs)],
            "mlp.up": [("mlp.c_fc", 0, outputs)],
            "mlp.down": [("mlp.c_proj", 0, outputs)],
        }
    queries = config.heads * config.head_width
    keys = config.query_groups * config.head_width
    hidden = config.hidden
    # If the gate equals the value, relu(gate) x value is relu(x)^2.
    value = hidden if config.gated else 0
    gate = [("mlp.gate_proj", 0, hidden)] if layout.gated else []
    return {
        "attention.qkv": [
            ("self_attn.q_proj", 0, queries),
            ("self_attn.k_proj", queries, keys),
            ("self_attn.v_proj", queries + keys, keys),
        ],
        "attention.output": [("self_attn.o_proj", 0, outputs)],
        "mlp.up": [*gate, ("mlp.up_proj", value, hidden)],
        "mlp.down": [("mlp.down_proj", 0, outputs)],
    }


def _others(config: GPTConfig, layout: Layout) -> Iterator[tuple[str, str]]:
    """Our names of the other tensors, and theirs, without `.weight` and `.bias`."""
    gpt2 = layout.model_type == "gpt2"
    yield "embedding", "transformer.wte" if gpt2 else "model.embed_tokens"
    if gpt2:
        yield "position_embedding", "transformer.wpe"
    yield "final_norm", "transformer.ln_f" if gpt2 else "model.norm"
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}" if gpt2 else f"model.layers.{i}"
        yield f"{ours}.attention_norm", f"{theirs}.{'ln_1' if gpt2 else 'input_layernorm'}"
        yield f"{ours}.mlp_norm", f"{theirs}.{'ln_2' if gpt2 else 'post_attention_layernorm'}"
        if config.qk_norm:
            yield f"{ours}.attention.query_norm", f"{theirs}.self_attn.q_norm"
            yield f"{ours}.attention.key_norm", f"{theirs}.self_attn.k_norm"


def _modules(
    config: GPTConfig, layout: Layout
) -> Iterator[tuple[str, tuple[Part, ...], bool, bool]]:
    """Each module with parameters of its own: our name, its parts, and whether their weights are
    transposed, as in GPT-2's Conv1D, and have biases, which GPT-2's always have."""
    gpt2 = layout.model_type == "gpt2"
    shapes = config.parameter_shapes()
    for ours, theirs in _others(config, layout):
        whole = Part(module=theirs, start=0, rows=shapes[f"{ours}.weight"][0])
        yield ours, (whole,), False, gpt2 and "norm" in ours
    for ours, parts in parts_of(config, layout).items():
        inner = ours != "lm_head"
        if inner or not config.tied:
            yield ours, parts, gpt2 and inner, inner and (gpt2 or config.bias)


def to_hf(config: GPTConfig, layout: Layout, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights, all parameters with the vocabulary not padded, as a transformers `state_dict` of
    the same dtype; tied weights appear once."""
    made: dict[str, Tensor] = {}
    for ours, parts, turned, biased in _modules(config, layout):
        weight = weights[f"{ours}.weight"]
        bias = weights.get(f"{ours}.bias", weight.new_zeros(len(weight)))
        for part in parts:
            own = part.of(weight)
            made[f"{part.module}.weight"] = own.t().contiguous() if turned else own
            if biased:
                made[f"{part.module}.bias"] = part.of(bias)
    return made


def from_hf(
    config: GPTConfig, layout: Layout, tensors: Mapping[str, Tensor], where: str
) -> dict[str, Tensor]:
    """The tensors of the folder `where` as our weights: float32, all parameters. They have
    transformers' names, with or without the base model's prefix, and are float32, bfloat16 or
    float16. Raises a UserError if one is missing, left over, of another shape or dtype, or not
    finite, or if they do not fit into the memory that is left; no memory is taken before the shapes
    in the files' headers are those of `config`."""
    source = _Source(layout, tensors, where)
    if config.layers > len(tensors):
        raise UserError(f"{where} has {len(tensors)} tensors, too few for {config.layers} layers.")
    shapes = config.parameter_shapes()
    for ours, parts, turned, biased in _modules(config, layout):
        _, *inputs = shapes[f"{ours}.weight"]
        for part in parts:
            source.require_shape(f"{part.module}.weight", _shape(part, inputs, turned))
            if biased:
                source.require_shape(f"{part.module}.bias", (part.rows,))
    require_free(4 * config.parameters(), where)
    made: dict[str, Tensor] = {}
    for ours, parts, turned, biased in _modules(config, layout):
        outputs, *inputs = shapes[f"{ours}.weight"]
        weight, bias = torch.empty(outputs, *inputs), torch.zeros(outputs)
        for number, part in enumerate(parts):
            rows = slice(part.start, part.start + part.rows)
            own = source.take(f"{part.module}.weight")
            own = own.t() if turned else own
            own_bias = source.take(f"{part.module}.bias") if biased else bias[rows]
            again = number and not part.start
            if again and not (torch.equal(weight[rows], own) and torch.equal(bias[rows], own_bias)):
                raise UserError(
                    f"{where}: hidden_act = relu, and {part.module} is not the same as its "
                    "gate_proj. Only relu(x)^2, where they are, can be read."
                )
            weight[rows], bias[rows] = own, own_bias
        made[f"{ours}.weight"] = weight
        if biased and config.bias:
            made[f"{ours}.bias"] = bias
        elif bias.any():
            raise UserError(
                f"{where}: the config says bias = false, and '{ours}.bias' is not zero."
            )
    if config.tied:
        source.require_tied(made["embedding.weight"])
    source.require_all_taken()
    return made


def _shape(part: Part, inputs: list[int], turned: bool) -> tuple[int, ...]:
    """The shape of a part's weight in transformers."""
    return (*inputs, part.rows) if turned else (part.rows, *inputs)


class _Source:
    """A folder's tensors; each is checked, and taken once."""

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor], where: str) -> None:
        self.where, self._tensors = where, tensors
        self._prefix = "transformer." if layout.model_type == "gpt2" else "model."
        # Masks and tables that older versions saved; they are computed instead.
        computed = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
        self._left = {name for name in tensors if not name.endswith(computed)}

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise a UserError if the tensor `name` is missing, or its file's header has another
        shape."""
        there, tensors = self._name(name), self._tensors
        stated = tensors.shape(there) if isinstance(tensors, Tensors) else (*tensors[there].shape,)
        if stated != shape:
            raise UserError(
                f"{self.where}: '{there}' is {tensors[there].dtype} {stated}; wanted is {shape}, "
                "in float32, bfloat16 or float16."
            )

    def take(self, name: str) -> Tensor:
        """The tensor `name` in float32. Raises what `from_hf` raises."""
        there = self._name(name)
        self._left.discard(there)
        tensor = self._tensors[there]
        if tensor.dtype not in READABLE:
            raise UserError(
                f"{self.where}: '{there}' is {tensor.dtype}; wanted is float32, bfloat16 or "
                "float16."
            )
        if not tensor.isfinite().all():
            raise UserError(f"{self.where}: '{there}' is not finite.")
        return tensor.float()

    def _name(self, name: str) -> str:
        """The name of a tensor in the files, with or without the base model's prefix."""
        there = name if name in self._tensors else name.removeprefix(self._prefix)
        if there not in self._tensors:
            raise UserError(f"{self.where} lacks the tensor '{name}'.")
        return there

    def require_tied(self, embedding: Tensor) -> None:
        """Raise a UserError if the head is tied but differs from the embedding."""
        if "lm_head.weight" in self._tensors:
            self.require_shape("lm_head.weight", tuple(embedding.shape))
            if not torch.equal(self.take("lm_head.weight"), embedding):
                raise UserError(
                    f"{self.where}: tie_word_embeddings = true, and lm_head.weight is not the "
                    "embedding. Save it with tie_word_embeddings = false."
                )

    def require_all_taken(self) -> None:
        """Raise a UserError if a tensor is left over."""
        if self._left:
            raise UserError(
                f"{self.where} has a tensor too many, '{quoted(min(self._left))}': it is of "
                "another model."
            )
