"""FP8 layers of NVIDIA's Transformer Engine. The only file that imports it; TE 2.20 or later.

TE's modules compute; parameters and FP8 state are ours. A `TELinear` owns `weight` and `bias` under
the names that every backend has, and lends them to a TE module for the length of a call: so a
norm and a linear can run as one TE module without sharing a name, a checkpoint holds no TE pickle,
and FSDP2 may exchange the parameters in between. In delayed scaling, TE casts with the scales of
our `AmaxHistory` and records amaxes that are moved into it; TE's own update never runs.

Every call opens TE's autocast by itself, so that it holds under DDP, FSDP2 and in a block that
activation checkpointing runs again in the backward pass.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
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

from fp8stack.backends.base import Backend, Norm
from fp8stack.backends.delayed import DelayedScaling
from fp8stack.backends.linear import LowPrecisionLinear, Size, no_autocast
from fp8stack.backends.observe import Observer
from fp8stack.backends.operands import Draws, LayerOperands
from fp8stack.errors import UserError
from fp8stack.formats import FORMATS, Quantizers
from fp8stack.ops.activations import TRANSFORMER_ENGINES
from fp8stack.ops.attention import Mask
from fp8stack.precision.kernels import feature_multiple, kernel_of
from fp8stack.precision.plan import LayerPlan, Plan
from fp8stack.precision.recipe import Recipe

_FWD, _BWD = "scaling_fwd", "scaling_bwd"  # TE's names of a module's two states
Slots = dict[str, dict[str, int]]
"""By TE's name of a state the FP8 slots in it, each with its place in TE's buffers."""

# Where a module of one or two GEMMs keeps its operands' scales and amaxes.
_FORWARD = [
    {"input": FP8FwdTensorIdx.GEMM1_INPUT, "weight": FP8FwdTensorIdx.GEMM1_WEIGHT},
    {"input": FP8FwdTensorIdx.GEMM2_INPUT, "weight": FP8FwdTensorIdx.GEMM2_WEIGHT},
]
_BACKWARD = [FP8BwdTensorIdx.GRAD_OUTPUT1, FP8BwdTensorIdx.GRAD_OUTPUT2]


# So in attention, as TE's META_QKV and its kin have it.
_ATTENTION = {
    _FWD: {
        "QKV": FP8FwdTensorIdx.GEMM1_OUTPUT,
        "O": FP8FwdTensorIdx.GEMM2_INPUT,
        "S": FP8FwdTensorIdx.GEMM3_OUTPUT,
    },
    _BWD: {
        "dQKV": FP8BwdTensorIdx.GRAD_OUTPUT1,
        "dO": FP8BwdTensorIdx.GRAD_INPUT2,
        "dP": FP8BwdTensorIdx.GRAD_INPUT3,
    },
}
_FIRST_OF_THIRD = {_FWD: 6, _BWD: 4}  # the third GEMM's places, a state of their own beside current


def te_recipe(quantizers: Quantizers) -> te_recipes.Recipe:
    """TE's form of a table of quantizers that one of its recipes has."""
    made: te_recipes.Recipe
    assert kernel_of(quantizers) is not None
    each = quantizers.each
    x, dy = each["input"], each["grad_output"]
    formats = te_recipes.Format.HYBRID if dy.format == "e5m2" else te_recipes.Format.E4M3
    if x.delayed:
        made = te_recipes.DelayedScaling(fp8_format=formats, margin=x.margin, **_ONE_ROW)
    elif x.per_tensor:
        made = te_recipes.Float8CurrentScaling(fp8_format=formats, backward_override=None)
        made.use_power_2_scales = x.scale == "power_of_two"
        _set_quantization(made, x.scale == "power_of_two", x.eps)
    elif x.scale == "e8m0":
        made = te_recipes.MXFP8BlockScaling(backward_override=None)
    elif x.scale == "e4m3":
        made = te_recipes.NVFP4BlockScaling(
            disable_rht=not each["grad_output.wgrad"].hadamard,
            disable_stochastic_rounding=not dy.stochastic,
            disable_2d_quantization=not each["weight"].turns,
            row_scaled_activation=False,
            nvfp4_4over6="none",
            backward_override=None,
        )
    else:
        made = te_recipes.Float8BlockScaling(backward_override=None)
        made.use_f32_scales = x.scale == "float32"
        _set_quantization(made, x.scale == "power_of_two", 0.0)
    return made


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


def _set_quantization(made: Any, power_of_two: bool, eps: float) -> None:
    """Set on the instance: TE 2.20 fixes these at import, whatever its constructor is told.
    To be deleted when `Float8CurrentScaling(use_power_2_scales=True)` has an effect."""
    options = te_recipes.QParams(power_2_scale=power_of_two, amax_epsilon=eps)
    made.fp8_quant_fwd_inp = options
    made.fp8_quant_fwd_weight = options
    made.fp8_quant_bwd_grad = options


class StatelessTEModule:
    """A TE module, made on the meta device and without parameters of its own, the recipe and the
    number of GEMMs for which it has FP8 buffers, and the slots of ours in them."""

    def __init__(
        self,
        module: nn.Module,
        backend: TEBackend,
        recipe: te_recipes.Recipe,
        gemms: int,
        slots: Slots,
    ) -> None:
        assert backend.delayed is None or isinstance(backend.delayed, TEDelayedScaling)
        self.module = module
        self.recipe = recipe
        self.gemms = gemms
        self.slots = slots
        self.compute_dtype = backend.compute_dtype
        self.delayed = backend.delayed if slots else None
        self._wanted = {_FWD: False, _BWD: False}
        self._views: dict[str, list[tuple[str, Tensor]]] = {}  # recorded amaxes, 0-dim
        self._buffers: dict[str, Tensor] = {}
        self._ready = False
        self._weights_of = -1  # the generation of the weights that TE holds as FP8

    def __call__(
        self, x: Tensor, parameters: dict[str, Tensor | None], generation: int | None
    ) -> Tensor:
        """The module's output for `x` [..., in], in the compute dtype; `parameters` are by TE's
        names. `generation` counts how often the weights changed, so that each state of them is
        quantized once; None quantizes them for this call alone."""
        first = None if generation is None else generation != self._weights_of
        cast = torch.autocast(x.device.type, dtype=self.compute_dtype)
        with cast, self._lent(parameters):
            y = self.call(x, is_first_microbatch=first)
        if generation is not None:
            self._weights_of = generation
        return y

    def call(self, *inputs: Tensor, **options: Any) -> Tensor:
        """The module's output in FP8, as TE takes its inputs."""
        with te.autocast(enabled=True, recipe=self.recipe):
            if not self._ready:
                self._prepare()
            y: Tensor = self.module(*inputs, **options)
        return y

    @contextmanager
    def _lent(self, parameters: dict[str, Tensor | None]) -> Iterator[None]:
        own = dict(self.module._parameters)
        self.module._parameters.update(parameters)  # type: ignore[arg-type]
        try:
            yield
        finally:
            self.module._parameters.update(own)

    def expect(self, key: str, records: bool) -> None:
        """Note whether the amaxes that TE records from now on, as it always does, are wanted."""
        if self._wanted[key] == records:
            return
        if self.delayed is not None and self._ready:
            self.delayed.take([self], (key,))  # what it recorded so far
        self._wanted[key] = records

    def recorded(self, key: str) -> tuple[list[tuple[str, Tensor]], Tensor]:
        """The slots whose amaxes are wanted, each with what TE recorded, and TE's whole buffer."""
        return self._views[key] if self._wanted[key] else [], self._buffers[key]

    def _prepare(self) -> None:
        """Have TE make its FP8 buffers now, to be filled before the first cast."""
        module: Any = self.module
        # A module that counts as registered is left out of TE's own update of the scales.
        module.fp8_meta.setdefault(FP8GlobalStateManager.get_buffer_info(), [])
        with torch.inference_mode(False):  # inference tensors could not be written to later
            module.init_fp8_metadata(num_gemms=self.gemms)
        self._ready = True
        if self.delayed is not None:
            for key, slots in self.slots.items():
                state = module.fp8_meta[key]
                self._buffers[key] = state.amax_history
                self._views[key] = [(name, state.amax_history[0, i]) for name, i in slots.items()]
                self.delayed.serve([(name, state.scale[i]) for name, i in slots.items()])
            self.delayed.cores.append(self)


def _slots_of_linears(paths: list[str]) -> Slots:
    """Of one or two linears in the order of their module's GEMMs."""
    found: Slots = {_FWD: {}, _BWD: {}}
    for path, forward, backward in zip(paths, _FORWARD, _BACKWARD, strict=False):
        found[_FWD] |= {f"{path}.{operand}": place for operand, place in forward.items()}
        found[_BWD][f"{path}.grad_output"] = backward
    return found


def _slots_of_attention(path: str, recipe: Recipe) -> Slots:
    """Of the attention at `path`; none, if its scales are not delayed."""
    wanted = recipe.attention_slots
    if not wanted:
        return {}
    return {
        key: {
            f"{path}.{operand}": place - _FIRST_OF_THIRD[key] * (recipe.attention == "current")
            for operand, place in places.items()
            if operand in wanted
        }
        for key, places in _ATTENTION.items()
    }


class TEDelayedScaling(DelayedScaling):
    """Delayed scaling whose casts TE makes: scales are copied to it, amaxes back from it."""

    def __init__(self) -> None:
        super().__init__()
        self.cores: list[StatelessTEModule] = []
        self._served: list[str] = []
        self._scales: list[Tensor] = []

    def serve(self, scales: list[tuple[str, Tensor]]) -> None:
        """Keep TE's scales of some slots in step with the history from now on."""
        for slot, scale in scales:
            self._served.append(slot)
            self._scales.append(scale)
            scale.copy_(self.scale(slot))

    def collect(self) -> None:
        """See `DelayedScaling.collect`: from TE's buffers."""
        self.take(self.cores, (_FWD, _BWD))

    @torch.no_grad()
    def take(self, cores: list[StatelessTEModule], keys: tuple[str, ...]) -> None:
        """Move what TE recorded for some modules into the history, in a few operations for all."""
        found = [core.recorded(key) for core in cores for key in keys]
        wanted = [pair for pairs, _ in found for pair in pairs]
        if wanted:
            self.record_all([slot for slot, _ in wanted], [amax for _, amax in wanted])
        if found:
            torch._foreach_zero_([buffer for _, buffer in found])

    @torch.no_grad()
    def distribute(self) -> None:
        """See `DelayedScaling.distribute`: to TE's buffers."""
        if self._served:
            torch._foreach_copy_(self._scales, [self.scale(slot) for slot in self._served])


class TELinear(LowPrecisionLinear):
    """A linear that TE computes, alone or together with what stands around it."""

    delayed: TEDelayedScaling | None

    def __init__(self, size: Size, path: str, backend: TEBackend) -> None:
        super().__init__(size, backend.compute_dtype, backend.delayed)
        self.path = path
        self.backend = backend
        self.cores: dict[str, StatelessTEModule] = {}

    def multiply(self, x: Tensor) -> Tensor:
        """See `LowPrecisionLinear.multiply`; rows are padded to what TE takes."""
        backend, rows = self.backend, len(x)
        if backend.hides_nan:
            x = _ShowNaN.apply(x)  # type: ignore[no-untyped-call]
        missing = -rows % backend.row_multiple
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        core = self.cores.get("linear")
        if core is None:
            module = te.Linear(self.in_features, self.out_features, **self.options())
            core = self.cores["linear"] = backend.core(module, self)
        y = backend.run(core, x, self.parameters_for(""), [self])
        return y[:rows] if missing else y

    def options(self, norm: nn.Module | None = None) -> dict[str, Any]:
        """What every TE module that takes this linear is made with, after a `norm` or without."""
        made = {"bias": self.bias is not None, "params_dtype": torch.float32, "device": "meta"}
        if norm is not None:
            made |= {"eps": norm.eps, "normalization": _NORMALIZATIONS[type(norm)]}
        return made

    def parameters_for(self, prefix: str) -> dict[str, Tensor | None]:
        """The weight and bias as a TE module calls them."""
        lent: dict[str, Tensor | None] = {f"{prefix}weight": self.matrix.contiguous()}
        if self.bias is not None:
            lent[f"{prefix}bias"] = self.bias
        return lent


class TEBackend(Backend):
    """FP8 on the hardware, by Transformer Engine."""

    keeps_weights = True

    def __init__(self, plan: Plan, *, draws: Draws | None = None) -> None:
        super().__init__(plan, draws=draws)
        quantizers = plan.recipe.quantizers
        assert quantizers is not None
        assert quantizers.input is not None
        self.row_multiple = feature_multiple(quantizers, "te")
        self.te_recipe = te_recipe(quantizers)
        self.input = quantizers.input  # all layers that TE runs have this quantizer
        self.hides_nan = FORMATS[self.input.format].dtype is None
        self.observer: Observer | None = None  # whoever looks at what is cast, see `observing`
        # By heads, groups and width, and by path if each has a state.
        self._attention: dict[tuple[str, int, int, int], StatelessTEModule] = {}
        self._attention_slots = plan.recipe.attention_slots
        if plan.recipe.fp8_attention:
            _require_cudnn(plan.recipe.attention)
            _require_usual_settings(plan.recipe.attention)

    def delayed_scaling(self) -> DelayedScaling:
        """See `Backend.delayed_scaling`."""
        return TEDelayedScaling()

    def fp8_linear(self, layer: LayerPlan, size: Size, operands: LayerOperands) -> TELinear:
        """See `Backend.fp8_linear`."""
        return TELinear(size, layer.name, self)

    def norm(self, kind: Norm, width: int, eps: float, bias: bool) -> nn.Module:
        """See `Backend.norm`: TE's, where TE has one."""
        if kind == "rmsnorm":
            return _RMSNorm(width, eps=eps, device="cpu", dtype=torch.float32)
        if bias:
            return _LayerNorm(width, eps=eps, device="cpu", dtype=torch.float32)
        return super().norm(kind, width, eps, bias)

    def norm_linear(self, x: Tensor, norm: nn.Module, linear: nn.Module) -> Tensor:
        """See `Backend.norm_linear`: TE's LayerNormLinear."""
        if not _is_fp8(linear) or not self._fuses(x, norm):
            return super().norm_linear(x, norm, linear)
        core = linear.cores.get("norm")
        if core is None:
            size = linear.in_features, linear.out_features
            module = te.LayerNormLinear(*size, **linear.options(norm))
            core = linear.cores["norm"] = self.core(module, linear)
        lent = _norm_parameters(norm) | linear.parameters_for("")
        y = self.run(core, x, lent, [linear])
        if self.observer is not None:
            self.observer.fused(linear, self._normed(x, norm), y)
        return y

    def norm_mlp(self, x: Tensor, norm: nn.Module, mlp: nn.Module) -> Tensor:
        """See `Backend.norm_mlp`: TE's LayerNormMLP."""
        up, down = mlp.up, mlp.down
        activation = TRANSFORMER_ENGINES.get(str(mlp.activation))
        if not _is_fp8(up) or not _is_fp8(down) or activation is None or not self._fuses(x, norm):
            return super().norm_mlp(x, norm, mlp)
        core = up.cores.get("mlp")
        if core is None:
            size = up.in_features, down.in_features
            module = te.LayerNormMLP(*size, activation=activation, **up.options(norm))
            core = up.cores["mlp"] = self.core(module, up, down)
        lent = _norm_parameters(norm) | up.parameters_for("fc1_") | down.parameters_for("fc2_")
        y = self.run(core, x, lent, [up, down])
        if self.observer is not None:
            # With these scales TE computes the activation and casts it in one kernel.
            fused = self.input.delayed or self.input.scale == "e8m0"
            inner = torch.float32 if fused else self.compute_dtype
            normed = self._normed(x, norm)
            self.observer.fused_mlp(up, down, str(mlp.activation), normed, y, inner)
        return y

    def core(self, module: nn.Module, *linears: TELinear) -> StatelessTEModule:
        """What computes one or two linears by a TE module."""
        slots = _slots_of_linears([linear.path for linear in linears])
        slots = slots if self.te_recipe.delayed() else {}
        return StatelessTEModule(module, self, self.te_recipe, len(linears), slots)

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
        """See `Backend.attention`. In FP8, if the recipe says so, by TE's DotProductAttention,
        which takes whole sequences of a multiple of 128 tokens; else, as while generating, in the
        compute dtype."""
        whole = q.shape[2] == k.shape[2] and q.shape[2] % 128 == 0 and mask is None
        if not self.plan.recipe.fp8_attention or path is None or not whole:
            return super().attention(q, k, v, dropout=dropout, mask=mask)
        core = self._attention_core(path, q.shape[1], k.shape[1], q.shape[3])
        # Those that have slots train always: else FlashAttention 3, if there, could take over from
        # cuDNN on Hopper, with other numbers.
        core.module.train(torch.is_grad_enabled() or bool(core.slots))
        records = self.delayed is not None and self.delayed.records(False)
        core.expect(_FWD, records)
        rows = [part.to(v.dtype).transpose(1, 2).contiguous() for part in (q, k, v)]
        try:
            with no_autocast(v.device.type):
                y = core.call(*rows)
        except ValueError as error:
            if "attention backend" not in str(error):
                raise
            # TE has just asked cuDNN, and it has no kernel.
            raise UserError(f"attention = '{self.plan.recipe.attention}': {error}") from error
        if y.requires_grad:
            y.register_hook(  # type: ignore[no-untyped-call]
                lambda dy: self._expect_backward(core, records)
            )
        return rearrange(y, "b t (h e) -> b h t e", h=q.shape[1])

    def _attention_core(self, path: str, heads: int, groups: int, width: int) -> StatelessTEModule:
        key = (path if self._attention_slots else "", heads, groups, width)
        if key not in self._attention:
            options = {"num_gqa_groups": groups, "qkv_format": "bshd", "attn_mask_type": "causal"}
            module = te.DotProductAttention(heads, width, **options)
            recipe, slots = self.plan.recipe, _slots_of_attention(path, self.plan.recipe)
            made = StatelessTEModule(module, self, te_attention_recipe(recipe), 3, slots)
            self._attention[key] = made
        return self._attention[key]

    def _normed(self, x: Tensor, norm: nn.Module) -> Tensor:
        """What a norm hands to the cast within a fused module, computed once more."""
        # Where TE fuses norm and cast, the values are not rounded in between.
        fused = self.input.delayed or (self.input.scale == "e8m0" and _cudnn_norms(x))
        with torch.no_grad(), no_autocast(x.device.type):
            normed: Tensor = norm(x.detach().to(self.compute_dtype))
            return normed.to(torch.float32 if fused else self.compute_dtype)

    def _fuses(self, x: Tensor, norm: nn.Module) -> bool:
        """Whether TE can take `norm` into a fused module; padded rows would not stay zero in it."""
        return type(norm) in _NORMALIZATIONS and x[..., 0].numel() % self.row_multiple == 0

    def run(
        self,
        core: StatelessTEModule,
        x: Tensor,
        parameters: dict[str, Tensor | None],
        linears: list[TELinear],
    ) -> Tensor:
        """What `core` makes of `x`. Weights are quantized once per optimizer step in training."""
        trains = linears[0].training and torch.is_grad_enabled()
        records = trains if self.delayed is None else self.delayed.records(trains)
        self.count_gemms(len(linears))
        core.expect(_FWD, records)
        y = core(x, parameters, self.weights.generation if records else None)
        if y.requires_grad:
            y.register_hook(  # type: ignore[no-untyped-call]
                partial(self._before_backward, core, _backward_gemms(x, parameters), records)
            )
        return y

    def _before_backward(
        self, core: StatelessTEModule, gemms: int, records: bool, dy: Tensor
    ) -> Tensor | None:
        self.count_gemms(gemms)
        self._expect_backward(core, records)
        return _with_infinities(dy) if self.hides_nan else None

    def _expect_backward(self, core: StatelessTEModule, records: bool) -> None:
        core.expect(_BWD, records)
        if records and self.delayed is not None:
            self.delayed.backward_ran()


# The first cuDNN that has it, and those with known errors, says TE 2.20; itself it needs 9.12.
_CUDNN: dict[str, tuple[int, tuple[int, ...], str]] = {
    "mxfp8": (92100, (92300, 92301), "9.21 or later, not 9.23.0 or 9.23.1"),
    "current": (91400, (), "9.14 or later"),
    "delayed": (91200, (), "9.12 or later"),
}
_REPEATABLE_CUDNN = 91900


def _require_cudnn(attention: str) -> None:
    """Raise a UserError if cuDNN has no such attention in FP8."""
    least, bad, words = _CUDNN[attention]
    found = torch.backends.cudnn.version() or least  # type: ignore[no-untyped-call]
    is_bad = found < least or found in bad
    if not is_bad and torch.are_deterministic_algorithms_enabled():
        is_bad, words = found < _REPEATABLE_CUDNN, "9.19 or later for deterministic = true"
    if is_bad:
        version = f"{found // 10000}.{found // 100 % 100}.{found % 100}"
        raise UserError(f"attention = '{attention}' needs cuDNN {words}. This is {version}.")


# With other values TE computes attention, or its gradients, in another precision and says nothing,
# or finds no kernel.
_USUAL_SETTINGS = {
    "NVTE_DPA_FP8_RECIPE": "",
    "NVTE_DPA_FP8CS_O_in_F16": "1",
    "NVTE_FP8_DPA_BWD": "1",
    "NVTE_FUSED_ATTN": "1",
    "NVTE_UnfusedDPA_Emulate_FP8": "0",
}


def _require_usual_settings(attention: str) -> None:
    """Raise a UserError if an environment variable makes TE's attention something else."""
    for name, usual in _USUAL_SETTINGS.items():
        if (found := os.environ.get(name, usual)) != usual:
            raise UserError(
                f"attention = '{attention}' is another with the environment variable {name} = "
                f"'{found}'. Unset it."
            )


def _with_infinities(x: Tensor) -> Tensor:
    """`x` with infinities in place of NaN. FP4 has codes for neither. TE leaves a NaN out of the
    amax of the tensor; an infinity makes all of its product infinite or NaN, so that it shows."""
    return x.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


class _ShowNaN(torch.autograd.Function):
    """`_with_infinities`, which keeps nothing for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _with_infinities(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class _LayerNorm(te.LayerNorm):  # type: ignore[misc]
    """TE's norm without its pickled extra state, of which it has none."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class _RMSNorm(te.RMSNorm):  # type: ignore[misc]
    """See `_LayerNorm`."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


def _cudnn_norms(x: Tensor) -> bool:
    """Whether TE lets cuDNN norm `x` and cast it to MXFP8 in one kernel, which takes whole tiles
    (csrc/extensions/normalization.cpp of TE 2.20)."""
    rows, width = x[..., 0].numel(), x.shape[-1]
    return os.environ.get("NVTE_NORM_FWD_USE_CUDNN") == "1" and rows % 128 == width % 128 == 0


def _is_fp8(part: object) -> TypeGuard[TELinear]:
    return isinstance(part, TELinear) and part.in_fp8


def _backward_gemms(x: Tensor, parameters: dict[str, Tensor | None]) -> int:
    """How many GEMMs the backward pass of a TE module takes for these inputs."""
    weights = [p for n, p in parameters.items() if n.endswith("weight") and "norm" not in n]
    needs_dw = sum(weight is not None and weight.requires_grad for weight in weights)
    needs_dx = x.requires_grad or any("norm" in n for n in parameters)  # which always wants it
    return needs_dw + needs_dx + len(weights) - 1


_NORMALIZATIONS: dict[type, str] = {_LayerNorm: "LayerNorm", _RMSNorm: "RMSNorm"}


def _norm_parameters(norm: nn.Module) -> dict[str, Tensor | None]:
    """A norm's parameters as TE's fused modules call them."""
    return {f"layer_norm_{name}": value for name, value in norm._parameters.items()}
