"""Converts weights to transformers' names and shapes, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8stack.common.errors import UserError, quoted
from fp8stack.model.config import GPTConfig
from fp8stack.model.hf.architectures import Layout
from fp8stack.model.hf.stored_tensors import DequantizedTensors
from fp8stack.precision.system_memory import require_free

READABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class HfModule:
    """A module of transformers whose weight is some rows of an fp8stack linear, or of an expert's
    matrix in a grouped linear."""

    path: str  # module path in transformers
    start: int  # first row
    rows: int
    expert: int | None = None  # its index, in a grouped linear

    @property
    def place(self) -> tuple[int | slice, ...]:
        """The index of the module's rows in a weight or bias of the linear."""
        rows = slice(self.start, self.start + self.rows)
        return (rows,) if self.expert is None else (self.expert, rows)

    def select(self, tensor: Tensor) -> Tensor:
        """Copy the module's rows of a weight or bias of the linear."""
        return tensor[self.place].contiguous().clone()


def modules_of(config: GPTConfig, layout: Layout) -> dict[str, tuple[HfModule, ...]]:
    """The transformers modules of each linear, in order of rows: {fp8stack path: modules}."""
    modules_by_linear: dict[str, tuple[HfModule, ...]] = {}
    for name, (_, outputs) in config.linear_shapes().items():
        if name == "lm_head":
            modules_by_linear[name] = (HfModule(path="lm_head", start=0, rows=outputs),)
            continue
        _, block, linear = name.split(".", 2)
        stem = f"transformer.h.{block}" if layout.model_type == "gpt2" else f"model.layers.{block}"
        experts: list[int | None] = [None]
        if config.experts is not None and name in config.grouped:
            experts = list(range(config.experts.count))
        modules_by_linear[name] = tuple(
            HfModule(path=f"{stem}.{module.format(expert)}", start=start, rows=rows, expert=expert)
            for expert in experts
            for module, start, rows in _rows(config, layout, outputs)[linear]
        )
    return modules_by_linear


def _rows(config: GPTConfig, layout: Layout, outputs: int) -> dict[str, list[tuple[str, int, int]]]:
    """The transformers modules of each linear of a block: (name, first row, number of rows); of a
    grouped linear, the modules of one expert, whose index is to replace the braces. `outputs` is
    the number of rows of a linear that is a single module."""
    if layout.model_type == "gpt2":
        return {
            "attention.qkv": [("attn.c_attn", 0, outputs)],
            "attention.output": [("attn.c_proj", 0, outputs)],
            "mlp.up": [("mlp.c_fc", 0, outputs)],
            "mlp.down": [("mlp.c_proj", 0, outputs)],
        }
    queries = config.heads * config.head_dim
    keys = config.query_groups * config.head_dim
    hidden = config.hidden
    # If the gate equals the value, relu(gate) x value is relu(x)^2.
    value = hidden if config.gated else 0
    gate = [("mlp.gate_proj", 0, hidden)] if layout.gated else []
    rows = {
        "attention.qkv": [
            ("self_attn.q_proj", 0, queries),
            ("self_attn.k_proj", queries, keys),
            ("self_attn.v_proj", queries + keys, keys),
        ],
        "attention.output": [("self_attn.o_proj", 0, outputs)],
        "mlp.up": [*gate, ("mlp.up_proj", value, hidden)],
        "mlp.down": [("mlp.down_proj", 0, outputs)],
    }
    if config.experts is not None and layout.experts is not None:
        hidden, value = config.experts.width, config.experts.width if config.gated else 0
        module, (gate_name, up, down) = layout.experts.module, layout.experts.linears
        stem = f"{module}.experts.{{}}"
        rows |= {
            "mlp.router": [(f"{module}.gate", 0, outputs)],
            "mlp.experts.up": [
                (f"{stem}.{gate_name}", 0, hidden),
                (f"{stem}.{up}", value, hidden),
            ],
            "mlp.experts.down": [(f"{stem}.{down}", 0, outputs)],
        }
    return rows


def _other_modules(config: GPTConfig, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield the paths of embeddings and norms: (fp8stack's, transformers')."""
    gpt2 = layout.model_type == "gpt2"
    yield "embedding", "transformer.wte" if gpt2 else "model.embed_tokens"
    if gpt2:
        yield "position_embedding", "transformer.wpe"
    yield "final_norm", "transformer.ln_f" if gpt2 else "model.norm"
    for i in range(config.layers):
        block, hf_block = f"blocks.{i}", f"transformer.h.{i}" if gpt2 else f"model.layers.{i}"
        yield f"{block}.attention_norm", f"{hf_block}.{'ln_1' if gpt2 else 'input_layernorm'}"
        yield f"{block}.mlp_norm", f"{hf_block}.{'ln_2' if gpt2 else 'post_attention_layernorm'}"
        if config.qk_norm:
            yield f"{block}.attention.query_norm", f"{hf_block}.self_attn.q_norm"
            yield f"{block}.attention.key_norm", f"{hf_block}.self_attn.k_norm"


def _modules(
    config: GPTConfig, layout: Layout
) -> Iterator[tuple[str, tuple[HfModule, ...], bool, bool]]:
    """Yield each module with parameters: its fp8stack path, its transformers modules, whether their
    weights are transposed (GPT-2's Conv1D), and whether they have biases (GPT-2's always do)."""
    gpt2 = layout.model_type == "gpt2"
    shapes = config.parameter_shapes()
    for name, hf_name in _other_modules(config, layout):
        module = HfModule(path=hf_name, start=0, rows=shapes[f"{name}.weight"][0])
        yield name, (module,), False, gpt2 and "norm" in name
    for name, modules in modules_of(config, layout).items():
        inner = name != "lm_head"
        if inner or not config.tied:
            yield name, modules, gpt2 and inner, inner and (gpt2 or config.bias)


def to_hf(config: GPTConfig, layout: Layout, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert all parameters, without vocabulary padding, to a transformers `state_dict` of the
    same dtype. Tied weights appear once."""
    state: dict[str, Tensor] = {}
    for name, modules, transposed, has_bias in _modules(config, layout):
        weight = weights[f"{name}.weight"]
        bias = weights.get(f"{name}.bias", weight.new_zeros(len(weight)))
        for module in modules:
            rows = module.select(weight)
            state[f"{module.path}.weight"] = rows.t().contiguous() if transposed else rows
            if has_bias:
                state[f"{module.path}.bias"] = module.select(bias)
    return state


def from_hf(
    config: GPTConfig, layout: Layout, tensors: Mapping[str, Tensor], where: str
) -> dict[str, Tensor]:
    """Convert the tensors of a transformers folder to fp8stack's weights: all parameters, float32.

    No memory is allocated before the shapes in the files' headers match `config`.

    Args:
        tensors: tensors under transformers' names, with or without the base model's prefix, in
            float32, bfloat16 or float16.
        where: the folder, for messages.

    Raises:
        UserError: a tensor is missing, unexpected, not finite, or of another shape or dtype; or the
            weights do not fit into the free memory.
    """
    source = _Source(layout, tensors, where)
    _require_shapes(config, layout, source, len(tensors))
    require_free(4 * config.parameters(), where)
    state = dict(_read(config, layout, source))
    if config.tied:
        source.require_tied(state["embedding.weight"])
    source.require_all_taken()
    return state


def _require_shapes(config: GPTConfig, layout: Layout, source: _Source, count: int) -> None:
    """Compare the shapes in the headers of a folder with `count` tensors. For errors see
    `from_hf`."""
    experts, dense = (1, 0) if config.experts is None else (
        config.experts.count, config.experts.first_dense
    )  # fmt: skip
    if (config.layers - dense) * experts > count:
        of_experts = f" of {experts} experts" if experts > 1 else ""
        raise UserError(
            f"{source.where} has {count} tensors, too few for {config.layers} layers{of_experts}."
        )
    shapes = config.parameter_shapes()
    for name, modules, transposed, has_bias in _modules(config, layout):
        inputs = _inputs(shapes[f"{name}.weight"])
        for module in modules:
            source.require_shape(f"{module.path}.weight", _shape(module, inputs, transposed))
            if has_bias:
                source.require_shape(f"{module.path}.bias", (module.rows,))


def holds(
    config: GPTConfig,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    where: str,
    weights: Mapping[str, Tensor],
) -> bool:
    """Whether the tensors of a transformers folder have the values of these float32 `weights`. One
    weight of the folder is in memory at a time. Arguments and errors are those of `from_hf`."""
    source = _Source(layout, tensors, where)
    _require_shapes(config, layout, source, len(tensors))
    return all(torch.equal(weight, weights[name]) for name, weight in _read(config, layout, source))


def _read(config: GPTConfig, layout: Layout, source: _Source) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a folder by name; for errors see `from_hf`."""
    where, shapes = source.where, config.parameter_shapes()
    for name, modules, transposed, has_bias in _modules(config, layout):
        shape = shapes[f"{name}.weight"]
        weight, bias = torch.empty(shape), torch.zeros(shape[:-1] or shape)
        read: set[tuple[int | None, int]] = set()
        for module in modules:
            place = module.place
            module_weight = source.take(f"{module.path}.weight")
            module_weight = module_weight.t() if transposed else module_weight
            module_bias = source.take(f"{module.path}.bias") if has_bias else bias[place]
            is_repeated = (module.expert, module.start) in read
            if is_repeated and not (
                torch.equal(weight[place], module_weight) and torch.equal(bias[place], module_bias)
            ):
                raise UserError(
                    f"{where}: hidden_act = relu, and {module.path} is not the same as its "
                    "gate_proj. Only relu(x)^2, where they are, can be read."
                )
            weight[place], bias[place] = module_weight, module_bias
            read.add((module.expert, module.start))
        yield f"{name}.weight", weight
        if has_bias and config.bias:
            yield f"{name}.bias", bias
        elif bias.any():
            raise UserError(
                f"{where}: the config says bias = false, and '{name}.bias' is not zero."
            )


def _inputs(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The inputs of a weight [..., out, in]; a vector has none."""
    return shape[-1:] if len(shape) > 1 else ()


def _shape(module: HfModule, inputs: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    """The shape of the module's weight in transformers."""
    return (*inputs, module.rows) if transposed else (module.rows, *inputs)


class _Source:
    """A folder's tensors. Each is checked, and read once."""

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor], where: str) -> None:
        self.where, self._tensors = where, tensors
        self._prefix = "transformer." if layout.model_type == "gpt2" else "model."
        # Masks and tables that older versions saved; fp8stack computes them.
        computed = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")
        self._unread = {name for name in tensors if not name.endswith(computed)}

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise a UserError if the tensor `name` is missing, or its file's header has another
        shape."""
        stored_name, tensors = self._name(name), self._tensors
        if isinstance(tensors, DequantizedTensors):
            stored_shape = tensors.shape(stored_name)
        else:
            stored_shape = tuple(tensors[stored_name].shape)
        if stored_shape != shape:
            raise UserError(
                f"{self.where}: '{stored_name}' is {tensors[stored_name].dtype} {stored_shape}; "
                f"wanted is {shape}, in float32, bfloat16 or float16."
            )

    def take(self, name: str) -> Tensor:
        """The tensor `name` in float32. For errors see `from_hf`."""
        stored_name = self._name(name)
        self._unread.discard(stored_name)
        tensor = self._tensors[stored_name]
        if tensor.dtype not in READABLE:
            raise UserError(
                f"{self.where}: '{stored_name}' is {tensor.dtype}; wanted is float32, bfloat16 or "
                "float16."
            )
        if not tensor.isfinite().all():
            raise UserError(f"{self.where}: '{stored_name}' is not finite.")
        return tensor.float()

    def _name(self, name: str) -> str:
        """The name of a tensor in the files, with or without the base model's prefix."""
        stored_name = name if name in self._tensors else name.removeprefix(self._prefix)
        if stored_name not in self._tensors:
            raise UserError(f"{self.where} lacks the tensor '{name}'.")
        return stored_name

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
        if self._unread:
            raise UserError(
                f"{self.where} has a tensor too many, '{quoted(min(self._unread))}': it is of "
                "another model."
            )
