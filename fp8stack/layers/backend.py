"""The interface of backends to a model, and FP8 state by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp8stack.common.errors import UserError, described, quoted
from fp8stack.layers.compiler import CompileBackend
from fp8stack.layers.delayed import DelayedScaling
from fp8stack.layers.fsdp import ShardedWeight
from fp8stack.layers.grouped import GroupedLinear, GroupedSize
from fp8stack.layers.kernels.attention import Mask, attend
from fp8stack.layers.kernels.eager import RMSNorm
from fp8stack.layers.linear import (
    CastLinear,
    LowPrecisionLayer,
    LowPrecisionLinear,
    Size,
    no_autocast,
    plain_linear,
)
from fp8stack.layers.operands import LayerOperands, RngState
from fp8stack.layers.weight_changes import CachedWeight, WeightChanges, version_of
from fp8stack.precision.plan import LayerPlan, Plan
from fp8stack.precision.recipe import ComputeDtype

Norm = Literal["layernorm", "rmsnorm"]

DTYPES: dict[ComputeDtype, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Backend:
    """Builds the layers of a model in the precision that `plan` decided for their module paths.

    This class is the backend `reference`, plain torch: float32 master weights that are cast to the
    compute dtype at each use, or in a run once per optimizer step; in fp32 the layers are torch's
    and their results the same to the bit.
    Subclasses add FP8.

    Attributes:
        compute_dtype: the dtype of the outputs of linears and, unless the plan names another, of
            attention.
        attention_dtype: the dtype in which attention computes.
        residual_dtype: the dtype of the residual stream.
        vocabulary_multiple: the vocabulary is padded to a multiple of this.
        delayed: delayed scaling of the model, if any layer has it.
        draws: the random number counters of stochastic rounding, shared by the models of a run's
            phases.
        weights: detects changes of the weights.
        matmul_precision: the argument of torch.set_float32_matmul_precision.
        gemm_count: the number of GEMMs on FP8 operands in eager code since `fp8_gemms` ran.
        caches_weights: whether quantized weights are cached until they change.
        compiles_whole: whether torch.compile traces all layers; else code is compiled around some.
    """

    caches_weights = False
    compiles_whole = True
    delayed_scaling: type[DelayedScaling] = DelayedScaling  # the class of `delayed`
    observer: Any = None  # is passed the tensors that are cast, see `observe.observing`
    after_norm = False  # whether a norm computed the input of the linear that is called

    def __init__(self, plan: Plan, *, draws: RngState | None = None) -> None:
        self.plan = plan
        self.draws = RngState() if draws is None else draws
        self.compute_dtype = DTYPES[plan.compute_dtype]
        self.attention_dtype = DTYPES[plan.attention]
        self.residual_dtype = DTYPES[plan.recipe.residual]
        self.vocabulary_multiple = plan.vocabulary_multiple
        self.delayed = self.delayed_scaling() if plan.delayed else None
        self.weights = WeightChanges() if self.delayed is None else self.delayed.weights
        self.matmul_precision = "high" if plan.compute_dtype == "tf32" else "highest"
        self.gemm_count = 0
        self._delegates: dict[str, Backend] = {}
        self._cast_layers: list[LowPrecisionLayer] = []

    def linear(self, name: str, in_features: int, out_features: int, bias: bool) -> nn.Module:
        """A linear layer with parameters `weight` [out, in] and, if `bias`, `bias` [out]."""
        size = Size(in_features, out_features, bias)
        fp8_layer = self._fp8_layer(name)
        if fp8_layer is None:
            return plain_linear(size, self.compute_dtype)
        builder, layer, operands = fp8_layer
        return builder.fp8_linear(layer, size, operands)

    def grouped_linear(
        self, name: str, groups: int, in_features: int, out_features: int, bias: bool
    ) -> GroupedLinear:
        """A linear for each of some groups of rows, with parameters `weight` [groups, out, in] and,
        if `bias`, `bias` [groups, out]. The plan has it as a layer of (in, out)."""
        size = GroupedSize(groups, in_features, out_features, bias)
        fp8_layer = self._fp8_layer(name, groups)
        if fp8_layer is None:
            return GroupedLinear(size, self.compute_dtype)
        builder, layer, operands = fp8_layer
        return builder.fp8_grouped_linear(layer, size, operands)

    def _fp8_layer(
        self, name: str, groups: int = 0
    ) -> tuple[Backend, LayerPlan, LayerOperands] | None:
        """The backend that builds the layer `name`, the layer's plan, and its operands, whose state
        is added; None if the layer is not in FP8."""
        layer = self.plan.layer(name) if self.plan.is_fp8 else None
        if layer is None or layer.quantizers is None:
            return None
        slots = None
        if self.delayed is not None:
            slots = self.delayed.add_layer(name, layer.quantizers, groups)
        draws = self.draws.layer(name, groups) if layer.quantizers.stochastic else None
        builder = self._delegates[layer.backend] if layer.backend else self
        return builder, layer, LayerOperands(layer.quantizers, slots, draws)

    def delegate_to(self, delegate: Backend) -> None:
        """Have `delegate` build the layers that the plan assigns to it. They share the state of
        this backend."""
        delegate.delayed, delegate.weights = self.delayed, self.weights
        self._delegates[delegate.plan.backend] = delegate

    def fp8_linear(
        self, layer: LayerPlan, size: Size, operands: LayerOperands
    ) -> LowPrecisionLinear:
        """A linear layer with quantized operands, as decided by the plan."""
        raise NotImplementedError("The backend 'reference' has no FP8.")

    def fp8_grouped_linear(
        self, layer: LayerPlan, size: GroupedSize, operands: LayerOperands
    ) -> GroupedLinear:
        """A grouped linear with quantized operands, as decided by the plan."""
        raise NotImplementedError(f"The backend '{self.plan.backend}' has no grouped FP8.")

    def norm(self, kind: Norm, width: int, eps: float, bias: bool) -> nn.Module:
        """A norm over the last dimension, with float32 input and computation."""
        if kind == "rmsnorm":
            return RMSNorm(width, eps=eps)
        return nn.LayerNorm(width, eps=eps, bias=bias)

    def norm_linear(self, x: Tensor, norm: nn.Module, linear: nn.Module) -> Tensor:
        """`linear(norm(x))`, as one operation where the backend has one."""
        y: Tensor = linear(norm(x))
        return y

    def mlp(self, x: Tensor, mlp: nn.Module) -> Tensor:
        """`mlp(x)`, as one operation where the backend has one. `mlp` has the linears `up` and
        `down` and, by name, the `activation` between them."""
        y: Tensor = mlp(x)
        return y

    def norm_mlp(self, x: Tensor, norm: nn.Module, mlp: nn.Module) -> Tensor:
        """`mlp(norm(x))`, as one operation where the backend has one; see `mlp`."""
        return self.mlp(norm(x), mlp)

    def add_attention(self, path: str) -> None:
        """Add the FP8 state, if any, of attention in the module at `path`, which will call
        `attention`."""
        if self.delayed is not None:
            self.delayed.add_attention(path, self.plan.recipe.attention_slots)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dropout: float,
        mask: Mask | None = None,
        path: str | None = "",
    ) -> Tensor:
        """Attention in the dtype that the plan decided; causal without a `mask`.

        Args:
            q: queries [B, H, T, E] in any dtype.
            k: keys [B, G, S, E] in any dtype; S is T, or any number where there is one query.
            v: values [B, G, S, E] in the dtype of the linear's output, or in attention's dtype.
            dropout: the probability of dropping an attention weight.
            mask: the result of `attention.dense_mask` or `attention.document_mask`; S may be any
                number then.
            path: the path passed to `add_attention`; None disables FP8 attention.

        Returns:
            [B, H, T, E] in the dtype of `v`.
        """
        if self.plan.recipe.attention != "fp32":
            return attend(q.to(v.dtype), k.to(v.dtype), v, mask=mask, dropout=dropout)
        with no_autocast(v.device.type):
            return attend(q.float(), k.float(), v.float(), mask=mask, dropout=dropout).to(v.dtype)

    def attach(self, model: nn.Module) -> None:
        """Register the hooks on `model`, built of this backend's layers, that update FP8 state and
        cache quantized weights."""
        self.draws.attach(model)
        if self.delayed is not None:
            self.delayed.attach(model)
        elif self.caches_weights:
            layers = [layer for layer in model.modules() if isinstance(layer, LowPrecisionLayer)]
            self.weights.attach(model, layers)
        for backend in (self, *self._delegates.values()):
            backend.register_hooks(model)

    def register_hooks(self, model: nn.Module) -> None:
        """Register hooks on `model` for the layers that this backend built: without FP8, one that
        casts parameters once for all micro-batches of an optimizer step."""
        if self.plan.is_fp8 or self.compute_dtype == torch.float32:
            return
        self._share_casts(model)
        self.weights.watch(self._cast_layers)
        model.register_forward_pre_hook(self._cast_before_pass)

    def _share_casts(self, model: nn.Module) -> None:
        """Make the layers of `model` use the copies of `cast_parameters`."""
        self._cast_layers = [
            layer
            for layer in model.modules()
            if isinstance(layer, LowPrecisionLayer) and layer.cast_names
        ]
        for layer in self._cast_layers:
            layer.weight_changes = self.weights

    def _cast_before_pass(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.weights.only_tracked_changes:
            return  # reading the values to find other changes would take as long as casts
        trains = model.training and torch.is_grad_enabled()
        self.weights.begin_pass(trains)
        if trains and not torch.compiler.is_compiling():
            self.cast_parameters()
            self.weights.mark_copied()

    @torch.no_grad()
    def cast_parameters(self) -> None:
        """Cast biases, and the weights of layers without FP8, to the compute dtype, together, for
        all micro-batches of an optimizer step: those that may have changed. The copies are new
        tensors, so that a backward pass may still read those before."""
        changed = not self.weights.copied
        stale = [
            (layer, name, parameter)
            for layer in self._cast_layers
            for name, parameter in layer.stale_casts(changed)
        ]
        if not stale:
            return
        copies = [torch.empty_like(p, dtype=layer.compute_dtype) for layer, _, p in stale]
        torch._foreach_copy_(copies, [parameter for *_, parameter in stale])
        for (layer, name, parameter), copy in zip(stale, copies, strict=True):
            layer.casts = {**layer.casts, name: CachedWeight(copy, version_of(parameter))}

    def prepare_sharding(self, module: nn.Module) -> None:
        """Prepare the weights of `module`, none of which is tied, for sharding by FSDP2. A linear's
        weight is gathered in FP8 if a rank can cast its rows as the full weight is cast, and in the
        compute dtype if the layer is not in FP8; everything else in float32."""
        # FSDP2 replaces parameters in every pass: only optimizer steps indicate changes.
        self.weights.watch(())
        for cast_layer in self._cast_layers:
            cast_layer.casts = {}
        self._cast_layers = []
        for layer in module.modules():
            if type(layer) is CastLinear and layer.compute_dtype != torch.float32:
                layer.weight = nn.Parameter(ShardedWeight(layer.weight.data, layer))

    def before_all_gather(self) -> None:
        """Called on all ranks before each pass of a model that is sharded by FSDP2."""

    def compile_casts(self, backend: CompileBackend, mode: str) -> None:
        """Compile the casts of weights that run outside of compiled blocks, by torch.compile's
        `backend` in its `mode`."""

    def note_compiled_calls(self) -> None:
        """Note what layers note when they are compiled, where the compiler would not let them: in
        checkpointed code, attributes must not change."""
        for backend in (self, *self._delegates.values()):
            backend.weights.note_compiled_call()

    def set_matmul_precision(self, *_: object) -> None:
        """Set torch's precision of float32 GEMMs, for the process: a hook before the forward passes
        of a model, whose backward passes then have it too."""
        torch.set_float32_matmul_precision(self.matmul_precision)

    def fp8_gemms(self) -> int:
        """The number of GEMMs on FP8 operands that ran since the last call."""
        count, self.gemm_count = self.gemm_count, 0
        return count + sum(delegate.fp8_gemms() for delegate in self._delegates.values())


def continue_from(backend: Backend, delayed: DelayedScaling) -> None:
    """Make `backend` use the state of delayed scaling of another model in the same recipe. Call
    this before `backend` builds a layer."""
    for builder in (backend, *backend._delegates.values()):
        builder.delayed, builder.weights = delayed, delayed.weights


def fp8_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of a model's quantizers: `<module path>.<operand>.amax_history` and `.scale` of
    delayed scaling, float32, and `<module path>.draws` of stochastic rounding, int64. Tensors of a
    grouped linear have one more dimension at the end, of its groups. Several ranks first call
    `fp8stack.delayed_scaling_of(module).apply_pending_update()`, which reduces their amaxes.

    Empty unless the recipe has one of the two. Paths begin at the model that was built or
    converted, also if `module` wraps it; if several submodules of `module` were converted
    separately, paths begin at `module`.

    Raises:
        UserError: no submodule of `module` was converted.
    """
    _require_converted(module)
    return {
        f"{prefix}{name}": tensor
        for attribute in _KEEPERS
        for prefix, keeper in _keepers(module, attribute).items()
        for name, tensor in keeper.state_dict().items()
    }


def load_fp8_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the tensors of `fp8_state` into a model of the same layers and recipe.

    Raises:
        UserError: the model was not converted, or its FP8 state has other names or shapes.
    """
    _require_converted(module)
    _require_tensors(state)
    drawn = {name: tensor for name, tensor in state.items() if name.endswith(".draws")}
    scales = {name: tensor for name, tensor in state.items() if name not in drawn}
    for attribute, tensors in zip(_KEEPERS, (scales, drawn), strict=True):
        keepers = _keepers(module, attribute)
        stray = next((name for name in tensors if not name.startswith(tuple(keepers))), None)
        if stray is not None:
            raise UserError(
                f"FP8 state: '{stray}' has no place in this model, whose recipe keeps none."
            )
        for prefix, keeper in keepers.items():
            keeper.load_state_dict(
                {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            )
    for layer in module.modules():
        if isinstance(layer, LowPrecisionLayer) and layer.reminder is not None:
            layer.reminder.state_loaded()


def _require_converted(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise UserError(
            "FP8 state is in a model that fp8stack.convert was called on, not in "
            f"{described(module)}."
        )
    if not any(
        isinstance(child, LowPrecisionLayer)
        or isinstance(getattr(child, "stochastic_rounding", None), RngState)
        for child in module.modules()
    ):
        raise UserError(
            f"This {type(module).__name__} was not converted and has no FP8 state: call "
            "fp8stack.convert(model, recipe) first."
        )


def _require_tensors(state: object) -> None:
    if not isinstance(state, Mapping):
        raise UserError(
            f"FP8 state is the dictionary that fp8stack.fp8_state gave, not {described(state)}."
        )
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.is_meta:
            raise UserError(
                f"FP8 state: '{quoted(str(name))}' is {described(tensor)}. Give the dictionary "
                "that fp8stack.fp8_state gave, of names and tensors."
            )


_KEEPERS: dict[str, type[DelayedScaling | RngState]] = {
    "delayed_scaling": DelayedScaling,
    "stochastic_rounding": RngState,
}
"""The attributes of a model that hold FP8 state, and their types."""


def _keepers(module: nn.Module, attribute: str) -> dict[str, DelayedScaling | RngState]:
    """The holders of FP8 state in `module`, by the prefix of their names in `fp8_state`."""
    by_prefix: dict[str, DelayedScaling | RngState] = {}
    for path, child in module.named_modules():
        keeper: Any = getattr(child, attribute, None)
        passed_on = any(
            keeper is earlier for earlier in by_prefix.values()
        )  # a wrapper forwards attributes
        if isinstance(keeper, _KEEPERS[attribute]) and not passed_on:
            by_prefix[f"{path}." if path else ""] = keeper
    if len(by_prefix) > 1:
        return by_prefix
    keepers = list(by_prefix.values())
    if not keepers and attribute == "delayed_scaling":  # a layer refers to its model's state
        of_layers = (getattr(child, "delayed", None) for child in module.modules())
        keepers = [state for state in of_layers if isinstance(state, DelayedScaling)]
    return {"": keepers[0]} if keepers else {}
