"""FP8 layers of NVIDIA's Transformer Engine. The only file that imports it; TE 2.20 or later.

TE's modules compute; parameters and FP8 state belong to our modules. A `TELinear` has `weight` and
`bias`, the names of every backend, and registers them in a TE module for the duration of a call. So
a norm and a linear can run as one TE module and keep their names, a checkpoint contains no TE
pickle, and FSDP2 may replace the parameters between calls. In delayed scaling, TE casts with the
scales of our `AmaxHistory` and records amaxes, which are moved into it; TE's own update never runs.

Every call enters TE's autocast itself, so that it is active under DDP, under FSDP2, and when
activation checkpointing recomputes a block in the backward pass.

torch.compile traces none of these calls (`_eager`): TE refuses delayed scaling and most modules in
compiled code, and our hooks around them copy scales and amaxes. What is between them is compiled.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from einops import rearrange
from torch import Tensor, nn
from transformer_engine.common import recipe as te_recipes
from transformer_engine.pytorch.constants import FP8BwdTensorIdx, FP8FwdTensorIdx
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from fp8stack.common.errors import UserError
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.layers.backend import Backend, Norm
from fp8stack.layers.delayed import DelayedScaling
from fp8stack.layers.grouped import GroupedSize
from fp8stack.layers.grouped_te import TEGroupedLinear
from fp8stack.layers.kernels.activations import TRANSFORMER_ENGINES
from fp8stack.layers.kernels.attention import Mask
from fp8stack.layers.linear import LowPrecisionLinear, Size, no_autocast
from fp8stack.layers.operands import LayerOperands, RngState
from fp8stack.precision.fp8_attention import FP8_ATTENTION, SEQUENCE_MULTIPLE
from fp8stack.precision.native_gemms import feature_multiple, kernel_of
from fp8stack.precision.plan import LayerPlan, Plan
from fp8stack.precision.recipe import Recipe

_eager: Any = torch.compiler.disable

# TE's names of a module's two states, for the casts of the forward and of the backward pass.
_FWD, _BWD = "scaling_fwd", "scaling_bwd"
Place = tuple[str, int]
"""The location of an operand's scale and amax in TE: the state, and the index in its buffers."""

# The operands of each linear of a module, which has one or two.
_LINEARS: list[dict[str, Place]] = [
    {
        "input": (_FWD, getattr(FP8FwdTensorIdx, f"GEMM{gemm}_INPUT")),
        "weight": (_FWD, getattr(FP8FwdTensorIdx, f"GEMM{gemm}_WEIGHT")),
        "grad_output": (_BWD, getattr(FP8BwdTensorIdx, f"GRAD_OUTPUT{gemm}")),
    }
    for gemm in (1, 2)
]
# The places that each GEMM of a module has.
_PER_GEMM = {_FWD: 3, _BWD: 2}
# The operands of attention, as in TE's META_QKV and similar constants.
_ATTENTION: dict[str, Place] = {
    "QKV": (_FWD, FP8FwdTensorIdx.GEMM1_OUTPUT),
    "O": (_FWD, FP8FwdTensorIdx.GEMM2_INPUT),
    "S": (_FWD, FP8FwdTensorIdx.GEMM3_OUTPUT),
    "dQKV": (_BWD, FP8BwdTensorIdx.GRAD_OUTPUT1),
    "dO": (_BWD, FP8BwdTensorIdx.GRAD_INPUT2),
    "dP": (_BWD, FP8BwdTensorIdx.GRAD_INPUT3),
}
# The first indices of the third GEMM. In current scaling, it has a separate state, from index 0.
_FIRST_OF_THIRD = {state: 2 * places for state, places in _PER_GEMM.items()}


def te_recipe(quantizers: Quantizers) -> te_recipes.Recipe:
    """TE's form of a table of quantizers that one of its recipes has."""
    recipe: te_recipes.Recipe
    assert kernel_of(quantizers) is not None
    by_place = quantizers.each
    x, dy = by_place["input"], by_place["grad_output"]
    formats = te_recipes.Format.HYBRID if dy.format == "e5m2" else te_recipes.Format.E4M3
    if x.delayed:
        recipe = te_recipes.DelayedScaling(fp8_format=formats, margin=x.margin, **_ONE_ROW)
    elif x.per_tensor:
        recipe = te_recipes.Float8CurrentScaling(fp8_format=formats, backward_override=None)
        recipe.use_power_2_scales = x.scale == "power_of_two"
        _set_quantization(recipe, x.scale == "power_of_two", x.eps)
    elif x.scale == "e8m0":
        recipe = te_recipes.MXFP8BlockScaling(backward_override=None)
    elif x.scale == "e4m3":
        recipe = te_recipes.NVFP4BlockScaling(
            disable_rht=not by_place["grad_output.wgrad"].hadamard,
            disable_stochastic_rounding=not dy.stochastic,
            disable_2d_quantization=not by_place["weight"].turns,
            row_scaled_activation=False,
            nvfp4_4over6="none",
            backward_override=None,
        )
    else:
        recipe = te_recipes.Float8BlockScaling(backward_override=None)
        recipe.use_f32_scales = x.scale == "float32"
        _set_quantization(recipe, x.scale == "power_of_two", 0.0)
    return recipe


# TE records into the row. The window, and what follows from it, is in `AmaxHistory`.
_ONE_ROW: dict[str, Any] = {
    "amax_history_len": 1,
    "amax_compute_algo": "most_recent",
    "reduce_amax": False,
    "backward_override": None,
}


def te_attention_recipe(recipe: Recipe) -> te_recipes.Recipe:
    """TE's form of the FP8 attention of a recipe that has it."""
    if recipe.attention == "mxfp8":
        return te_recipes.MXFP8BlockScaling(fp8_dpa=True, backward_override=None)
    if recipe.attention == "current":
        options = {"use_power_2_scales": False, "backward_override": None}
        return te_recipes.Float8CurrentScaling(fp8_dpa=True, **options)
    return te_recipes.DelayedScaling(fp8_dpa=True, **_ONE_ROW)


def _set_quantization(recipe: Any, power_of_two: bool, eps: float) -> None:
    """Set on the instance: TE 2.20 fixes these at import, whatever its constructor is given.
    To be deleted when `Float8CurrentScaling(use_power_2_scales=True)` has an effect."""
    options = te_recipes.QParams(power_2_scale=power_of_two, amax_epsilon=eps)
    recipe.fp8_quant_fwd_inp = options
    recipe.fp8_quant_fwd_weight = options
    recipe.fp8_quant_bwd_grad = options


class TEState:
    """The scales and amaxes of our slots in one of the two states of a TE module. `buffers` is TE's
    state, `places` the index of each slot in its buffers."""

    def __init__(self, buffers: Any, places: dict[str, int]) -> None:
        self.records = False  # whether to use the amaxes that TE records; it always records them
        self.slots = list(places)
        self.scales = [buffers.scale[place] for place in places.values()]
        self.amaxes = [buffers.amax_history[0, place] for place in places.values()]
        self.recorded: Tensor = buffers.amax_history


class StatelessTEModule:
    """A TE module on the meta device, without parameters. It has FP8 buffers for `gemms` GEMMs in
    `recipe`; `places` are the locations of our slots in them."""

    def __init__(
        self,
        module: nn.Module,
        backend: TEBackend,
        recipe: te_recipes.Recipe,
        gemms: int,
        places: dict[str, Place],
    ) -> None:
        self.module = module
        self.recipe = recipe
        self.gemms = gemms
        self.places = places
        self.generation = -1  # of the weights that TE has quantized
        self._backend = backend
        self._states: dict[str, TEState] = {}
        self._ready = False

    def __call__(
        self,
        *inputs: Tensor,
        records: bool,
        backward_gemms: int = 0,
        parameters: dict[str, Tensor | None] | None = None,
        **options: Any,
    ) -> Tensor:
        """Call the module in FP8, with TE's arguments; `parameters` have TE's names. `records` is
        whether to use the amaxes that TE records in the forward and the backward pass, which has
        `backward_gemms` GEMMs of linears."""
        self._set_recording(_FWD, records)
        before = dict(self.module._parameters)
        self.module._parameters.update(parameters or {})  # type: ignore[arg-type]
        try:
            with te.autocast(enabled=True, recipe=self.recipe):
                y: Tensor = self.module(*inputs, **options)
        finally:
            self.module._parameters.update(before)
        if y.requires_grad:
            hook = partial(self._before_backward, records, backward_gemms)
            y.register_hook(hook)  # type: ignore[no-untyped-call]
        return y

    def _before_backward(self, records: bool, gemms: int, dy: Tensor) -> Tensor | None:
        backend = self._backend
        backend.gemm_count += gemms
        backend.weights.backward_ran()
        self._set_recording(_BWD, records)
        return _with_infinities(dy) if gemms and backend.hides_nan else None

    def _set_recording(self, key: str, records: bool) -> None:
        """Set whether the amaxes that TE records from now on in the state `key` are used."""
        if not self._ready:
            self._prepare()
        state = self._states.get(key)
        if state is not None and state.records != records:
            assert isinstance(self._backend.delayed, TEDelayedScaling)
            self._backend.delayed.read_amaxes([state])  # recorded so far
            state.records = records

    def _prepare(self) -> None:
        """Allocate TE's FP8 buffers, to copy scales to them before the first cast."""
        module: Any = self.module
        # TE's own update of the scales skips modules that are marked as registered.
        module.fp8_meta.setdefault(FP8GlobalStateManager.get_buffer_info(), [])
        # Inference tensors could not be written to later.
        with torch.inference_mode(False), te.autocast(enabled=True, recipe=self.recipe):
            module.init_fp8_metadata(num_gemms=self.gemms)
            if self.places:
                assert isinstance(self._backend.delayed, TEDelayedScaling)
                for key in (_FWD, _BWD):
                    places = {
                        slot: place for slot, (state, place) in self.places.items() if state == key
                    }
                    self._states[key] = TEState(module.fp8_meta[key], places)
                self._backend.delayed.register_states(self._states.values())
        self._ready = True


class TEDelayedScaling(DelayedScaling):
    """Delayed scaling for casts by TE: scales are copied to TE's buffers, amaxes from them."""

    def __init__(self) -> None:
        super().__init__()
        self._states: list[TEState] = []
        # For slots, by name, on the device: their columns, and whether they are not of weights.
        self._columns: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def attach(self, model: nn.Module) -> None:
        """See `DelayedScaling.attach`."""
        self._states = []  # of the modules of another model
        super().attach(model)

    @torch.no_grad()
    def register_states(self, states: Iterable[TEState]) -> None:
        """Add states of TE modules, whose scales and amaxes are copied from now on."""
        self._states += states
        self.copy_scales_out()

    def copy_amaxes_in(self) -> None:
        """See `DelayedScaling.copy_amaxes_in`."""
        self.read_amaxes(self._states)

    @torch.no_grad()
    def read_amaxes(self, states: list[TEState]) -> None:
        """Move the amaxes of some states into the history, with a few kernels for all of them."""
        recording = [state for state in states if state.records]
        names = tuple(name for state in recording for name in state.slots)
        if names:
            slots = [self.slots[name] for name in names]
            amaxes = torch.stack([amax for state in recording for amax in state.amaxes])
            if names not in self._columns:
                columns = torch.tensor([slot.column for slot in slots], device=amaxes.device)
                not_weights = [slot.operand != "weight" for slot in slots]
                self._columns[names] = columns, torch.tensor(not_weights, device=amaxes.device)
            columns, always_count = self._columns[names]
            counts = self.unrecorded[columns] | always_count  # see `Slot.cast_arguments`
            # A comparison with NaN is false: cuDNN may give one.
            counted = torch.where(counts & (amaxes >= 0), amaxes, 0.0)
            recorded = [self.history.recorded(name) for name in names]
            torch._foreach_maximum_(recorded, list(counted.unbind()))
        if states:
            torch._foreach_zero_([state.recorded for state in states])

    @torch.no_grad()
    def copy_scales_out(self) -> None:
        """See `DelayedScaling.copy_scales_out`."""
        scales = [scale for state in self._states for scale in state.scales]
        if scales:
            slots = [self.slots[name] for state in self._states for name in state.slots]
            torch._foreach_copy_(scales, [slot.scale() for slot in slots])


class TELinear(LowPrecisionLinear):
    """A linear that TE computes, alone or fused with the norm before it or with the MLP."""

    def __init__(self, size: Size, path: str, backend: TEBackend) -> None:
        super().__init__(size, backend.compute_dtype, backend.delayed)
        self.path = path
        self.backend = backend
        self.cores: dict[
            type, StatelessTEModule
        ] = {}  # TE modules whose first linear this is, by TE's class

    forward = _eager(LowPrecisionLinear.forward)

    def multiply(self, x: Tensor) -> Tensor:
        """See `LowPrecisionLinear.multiply`; rows are padded to a multiple that TE accepts."""
        backend, rows = self.backend, len(x)
        x = backend.show_nan(x)
        missing = -rows % backend.row_multiple
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        y = backend.run(te.Linear, x, [self], self.parameters_for(""))
        return y[:rows] if missing else y

    def parameters_for(self, prefix: str) -> dict[str, Tensor | None]:
        """The weight and bias, by their names in a TE module."""
        parameters: dict[str, Tensor | None] = {f"{prefix}weight": self.matrix.contiguous()}
        if self.bias is not None:
            parameters[f"{prefix}bias"] = self.bias
        return parameters


class TEBackend(Backend):
    """Builds linears on Transformer Engine's modules."""

    caches_weights = True
    compiles_whole = False
    delayed_scaling = TEDelayedScaling

    def __init__(self, plan: Plan, *, draws: RngState | None = None) -> None:
        super().__init__(plan, draws=draws)
        quantizers = plan.recipe.quantizers
        assert quantizers is not None
        assert quantizers.input is not None
        self.row_multiple = feature_multiple(quantizers, "te")
        # `get_align_size_for_quantization` in TE.
        self.group_multiple = {"mxfp8": 32, "nvfp4": 128}.get(str(kernel_of(quantizers)), 16)
        self.te_recipe = te_recipe(quantizers)
        self.input = quantizers.input  # all layers that TE runs have this quantizer
        self.hides_nan = not self.input.element.has_nan
        # Keys are the path (where attention has slots), heads, groups and width.
        self._attention: dict[tuple[str, int, int, int], StatelessTEModule] = {}
        if plan.recipe.fp8_attention:
            _require_attention(plan.recipe.attention)

    def fp8_linear(self, layer: LayerPlan, size: Size, operands: LayerOperands) -> TELinear:
        """See `Backend.fp8_linear`."""
        return TELinear(size, layer.name, self)

    def fp8_grouped_linear(
        self, layer: LayerPlan, size: GroupedSize, operands: LayerOperands
    ) -> TEGroupedLinear:
        """See `Backend.fp8_grouped_linear`."""
        return TEGroupedLinear(size, layer.name, self)

    def show_nan(self, x: Tensor) -> Tensor:
        """`x`, with infinities in place of NaN if TE would hide these."""
        return _ShowNaN.apply(x) if self.hides_nan else x  # type: ignore[no-untyped-call]

    def norm(self, kind: Norm, width: int, eps: float, bias: bool) -> nn.Module:
        """See `Backend.norm`; TE's norm, except for a LayerNorm without bias."""
        if kind == "layernorm" and not bias:
            return super().norm(kind, width, eps, bias)
        norm = _RMSNorm if kind == "rmsnorm" else _LayerNorm
        return norm(width, eps=eps, device="cpu", dtype=torch.float32)

    def norm_linear(self, x: Tensor, norm: nn.Module, linear: nn.Module) -> Tensor:
        """See `Backend.norm_linear`; by TE's LayerNormLinear if possible."""
        if not _is_fp8(linear) or not self._fuses(x, norm):
            return super().norm_linear(x, norm, linear)
        y: Tensor = self._norm_linear(x, norm, linear)
        return y

    @_eager  # type: ignore[untyped-decorator]
    def _norm_linear(self, x: Tensor, norm: nn.Module, linear: TELinear) -> Tensor:
        parameters = _norm_parameters(norm) | linear.parameters_for("")
        y = self.run(te.LayerNormLinear, x, [linear], parameters, norm)
        if self.observer is not None:
            self.observer.report_fused(linear, self._normed(x, norm), y)
        return y

    def norm_mlp(self, x: Tensor, norm: nn.Module, mlp: nn.Module) -> Tensor:
        """See `Backend.norm_mlp`; by TE's LayerNormMLP if possible."""
        up, down = mlp.up, mlp.down
        activation = TRANSFORMER_ENGINES.get(str(mlp.activation))
        if not _is_fp8(up) or not _is_fp8(down) or activation is None or not self._fuses(x, norm):
            return super().norm_mlp(x, norm, mlp)
        y: Tensor = self._norm_mlp(x, norm, mlp, activation)
        return y

    @_eager  # type: ignore[untyped-decorator]
    def _norm_mlp(self, x: Tensor, norm: nn.Module, mlp: Any, activation: str) -> Tensor:
        up, down = mlp.up, mlp.down
        linears = up.parameters_for("fc1_") | down.parameters_for("fc2_")
        parameters = _norm_parameters(norm) | linears
        y = self.run(te.LayerNormMLP, x, [up, down], parameters, norm, activation=activation)
        if self.observer is not None:
            # TE computes the activation and casts it in one kernel with these scales.
            fused = self.input.delayed or self.input.scale == "e8m0"
            inner = torch.float32 if fused else self.compute_dtype
            normed = self._normed(x, norm)
            self.observer.report_fused_mlp(up, down, str(mlp.activation), normed, y, inner)
        return y

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
        """See `Backend.attention`. In recipes with FP8 attention, by TE's DotProductAttention,
        which takes full sequences of a multiple of 128 tokens; otherwise, as in generation, in the
        compute dtype."""
        if not self.plan.recipe.fp8_attention:
            return super().attention(q, k, v, dropout=dropout, mask=mask)
        # Compiled code must not read the path, by which it would be compiled for each block.
        y: Tensor = self._fp8_attention(q, k, v, dropout, mask, path)
        return y

    @_eager  # type: ignore[untyped-decorator]
    def _fp8_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask | None, path: str | None
    ) -> Tensor:
        is_whole = q.shape[2] == k.shape[2] and q.shape[2] % SEQUENCE_MULTIPLE == 0 and mask is None
        if path is None or not is_whole:
            return super().attention(q, k, v, dropout=dropout, mask=mask)
        has_slots = FP8_ATTENTION[self.plan.recipe.attention].slots
        key = (path if has_slots else "", q.shape[1], k.shape[1], q.shape[3])
        core = self._attention.get(key)
        if core is None:
            core = self._attention[key] = _attention_core(self, *key)
        # Modules with slots are always in training mode: else TE could choose FlashAttention 3, if
        # installed, over cuDNN on Hopper, with other results.
        core.module.train(torch.is_grad_enabled() or bool(core.places))
        records = self.delayed is not None and self.delayed.records(False)
        rows = [x.to(v.dtype).transpose(1, 2).contiguous() for x in (q, k, v)]
        try:
            with no_autocast(v.device.type):
                y = core(*rows, records=records)
        except ValueError as error:
            if "attention backend" not in str(error):
                raise
            # TE found that cuDNN has no kernel.
            raise UserError(f"attention = '{self.plan.recipe.attention}': {error}") from error
        return rearrange(y, "b t (h e) -> b h t e", h=q.shape[1])

    def _normed(self, x: Tensor, norm: nn.Module) -> Tensor:
        """The norm's output as a fused module casts it, recomputed."""
        # If TE fuses norm and cast, the output is not rounded in between.
        fused = self.input.delayed or (self.input.scale == "e8m0" and _cudnn_norms(x))
        with torch.no_grad(), no_autocast(x.device.type):
            normed: Tensor = norm(x.detach().to(self.compute_dtype))
            return normed.to(torch.float32 if fused else self.compute_dtype)

    def _fuses(self, x: Tensor, norm: nn.Module) -> bool:
        """Whether TE can fuse `norm`; not with padding, since padded rows would not stay zero."""
        return type(norm) in _NORMALIZATIONS and x[..., 0].numel() % self.row_multiple == 0

    def run(
        self,
        kind: type,
        x: Tensor,
        linears: list[TELinear],
        parameters: dict[str, Tensor | None],
        norm: nn.Module | None = None,
        **options: str,
    ) -> Tensor:
        """The output for `x` of the TE module of class `kind` that computes `linears` and the
        `norm` before them. In training, weights are quantized once per optimizer step."""
        core = linears[0].cores.get(kind)
        if core is None:
            core = linears[0].cores[kind] = _linear_core(kind, linears, norm, options)
        gemms = len(linears), _backward_gemms(x, parameters)
        return self._run(core, linears[0], gemms, x, parameters)

    def run_grouped(self, layer: TEGroupedLinear, x: Tensor, sizes: Tensor) -> Tensor:
        """The output of TE's GroupedLinear for groups of `sizes`, int64 on the CPU."""
        if layer.core is None:
            layer.core = _grouped_core(layer)
        gemms = 1, x.requires_grad + layer.weight.requires_grad
        return self._run(
            layer.core, layer, gemms, self.show_nan(x), layer.parameters_of_groups(), sizes
        )

    def _run(
        self,
        core: StatelessTEModule,
        layer: nn.Module,
        gemms: tuple[int, int],
        x: Tensor,
        parameters: dict[str, Tensor | None],
        *inputs: Tensor,
    ) -> Tensor:
        """The output of `core`, whose first linear is `layer`; `gemms` are the number of GEMMs in
        the forward and in the backward pass."""
        trains = layer.training and torch.is_grad_enabled()
        records = trains if self.delayed is None else self.delayed.records(trains)
        self.gemm_count += gemms[0]
        generation = self.weights.generation
        changed = core.generation != generation or not self.weights.copies_are_current
        first = changed if records else None  # None: quantize for this call only
        options: dict[str, Any] = {"parameters": parameters, "is_first_microbatch": first}
        with torch.autocast(x.device.type, dtype=self.compute_dtype):
            y = core(x, *inputs, records=records, backward_gemms=gemms[1], **options)
        if records:
            core.generation = generation
        return y


def _linear_core(
    kind: type, linears: list[TELinear], norm: nn.Module | None, options: dict[str, Any]
) -> StatelessTEModule:
    """The TE module of class `kind` that computes `linears` and the `norm` before them."""
    first, inner = linears[0], linears[1].in_features if linears[1:] else None
    backend = first.backend
    options |= {"bias": first.bias is not None, "params_dtype": torch.float32, "device": "meta"}
    if norm is not None:
        options |= {"eps": norm.eps, "normalization": _NORMALIZATIONS[type(norm)]}
    module = kind(first.in_features, inner or first.out_features, **options)
    places = {
        f"{linear.path}.{operand}": place
        for linear, of_linear in zip(linears, _LINEARS, strict=False)
        for operand, place in of_linear.items()
        if backend.te_recipe.delayed()
    }
    return StatelessTEModule(module, backend, backend.te_recipe, len(linears), places)


def _grouped_core(layer: TEGroupedLinear) -> StatelessTEModule:
    """The TE module that computes `layer`."""
    backend = layer.backend
    options: dict[str, Any] = {"params_dtype": torch.float32, "device": "meta"}
    options |= {"bias": layer.bias is not None, "use_grouped_tensor": False}
    sizes = layer.groups, layer.in_features, layer.out_features
    places = {
        f"{layer.path}.{group}.{operand}": (state, place + group * _PER_GEMM[state])
        for group in range(layer.groups)
        for operand, (state, place) in _LINEARS[0].items()
        if backend.te_recipe.delayed()
    }
    module = te.GroupedLinear(*sizes, **options)
    return StatelessTEModule(module, backend, backend.te_recipe, layer.groups, places)


def _attention_core(
    backend: TEBackend, path: str, heads: int, groups: int, width: int
) -> StatelessTEModule:
    """The TE module that computes attention at `path` with `groups` heads of keys and values."""
    recipe = backend.plan.recipe
    options = {"num_gqa_groups": groups, "qkv_format": "bshd", "attn_mask_type": "causal"}
    module = te.DotProductAttention(heads, width, **options)
    places: dict[str, Place] = {}
    for operand in FP8_ATTENTION[recipe.attention].slots:
        state, place = _ATTENTION[operand]
        place -= _FIRST_OF_THIRD[state] if recipe.attention == "current" else 0
        places[f"{path}.{operand}"] = state, place
    return StatelessTEModule(module, backend, te_attention_recipe(recipe), 3, places)


_REPEATABLE_CUDNN = 91900
# With other values, TE silently computes attention or its gradients in another precision, or finds
# no kernel.
_USUAL_SETTINGS = {
    "NVTE_DPA_FP8_RECIPE": "",
    "NVTE_DPA_FP8CS_O_in_F16": "1",
    "NVTE_FP8_DPA_BWD": "1",
    "NVTE_FUSED_ATTN": "1",
    "NVTE_UnfusedDPA_Emulate_FP8": "0",
}


def _require_attention(attention: str) -> None:
    """Raise a UserError if cuDNN does not support this FP8 attention, or an environment variable
    changes TE's."""
    (least, *bad), needs = FP8_ATTENTION[attention].cudnn, FP8_ATTENTION[attention].cudnn_in_words
    cudnn = torch.backends.cudnn.version() or least  # type: ignore[no-untyped-call]
    is_bad = cudnn < least or cudnn in bad
    if not is_bad and torch.are_deterministic_algorithms_enabled():
        is_bad, needs = cudnn < _REPEATABLE_CUDNN, "9.19 or later for deterministic = true"
    if is_bad:
        version = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
        raise UserError(f"attention = '{attention}' needs cuDNN {needs}. This is {version}.")
    for name, usual in _USUAL_SETTINGS.items():
        if (setting := os.environ.get(name, usual)) != usual:
            raise UserError(
                f"attention = '{attention}' is another with the environment variable {name} = "
                f"'{setting}'. Unset it."
            )


def _with_infinities(x: Tensor) -> Tensor:
    """`x` with infinities in place of NaN, so that a NaN is not lost. FP4 has codes for neither,
    and TE ignores a NaN in the amax; but an infinity makes the full product infinite or NaN."""
    return x.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


class _ShowNaN(torch.autograd.Function):
    """`_with_infinities`, without saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _with_infinities(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class _LayerNorm(te.LayerNorm):  # type: ignore[misc]
    """TE's norm, without the extra state that TE's modules pickle and norms do not use."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state
    forward = _eager(te.LayerNorm.forward)


class _RMSNorm(te.RMSNorm):  # type: ignore[misc]
    """See `_LayerNorm`."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state
    forward = _eager(te.RMSNorm.forward)


def _cudnn_norms(x: Tensor) -> bool:
    """Whether TE has cuDNN normalize `x` and cast it to MXFP8 in one kernel, which takes full tiles
    (csrc/extensions/normalization.cpp of TE 2.20)."""
    rows, width = x[..., 0].numel(), x.shape[-1]
    return os.environ.get("NVTE_NORM_FWD_USE_CUDNN") == "1" and rows % 128 == width % 128 == 0


def _is_fp8(module: object) -> TypeGuard[TELinear]:
    return isinstance(module, TELinear) and module.in_fp8


def _backward_gemms(x: Tensor, parameters: dict[str, Tensor | None]) -> int:
    """The number of GEMMs in the backward pass of a TE module for these inputs."""
    weights = [p for n, p in parameters.items() if n.endswith("weight") and "norm" not in n]
    needs_dw = sum(weight is not None and weight.requires_grad for weight in weights)
    needs_dx = x.requires_grad or any("norm" in n for n in parameters)  # a norm always needs dx
    return needs_dw + needs_dx + len(weights) - 1


_NORMALIZATIONS: dict[type, str] = {_LayerNorm: "LayerNorm", _RMSNorm: "RMSNorm"}


def _norm_parameters(norm: nn.Module) -> dict[str, Tensor | None]:
    """A norm's parameters, by their names in TE's fused modules."""
    return {f"layer_norm_{name}": value for name, value in norm._parameters.items()}
