"""A stand-in for Transformer Engine 2.20 (TE) on a CPU, held to TE's own Python source.

TE's compiled extension needs a GPU; its Python source needs only to be read. From it come the
recipes, which are executed; the signature of everything that may be called, so that an argument
that TE does not have is a TypeError; and `FACTS`, what `fp8stack.backends.te` relies on in TE's
insides. The modules here keep TE's state as TE does, and compute with `fp8stack.numerics`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8stack.backends
from fp8stack import numerics

_SPEC = importlib.util.find_spec("transformer_engine")  # finds it without importing it
assert _SPEC is not None and _SPEC.submodule_search_locations is not None
ROOT = Path(_SPEC.submodule_search_locations[0])

QUANTIZATION = "pytorch/quantization.py"
BASE = "pytorch/module/base.py:TransformerEngineBaseModule"
LINEAR = "pytorch/module/linear.py:Linear"
NORM_LINEAR = "pytorch/module/layernorm_linear.py:LayerNormLinear"
NORM_MLP = "pytorch/module/layernorm_mlp.py:LayerNormMLP"
MANAGER = f"{QUANTIZATION}:FP8GlobalStateManager"
DELAYED_STATE = f"{QUANTIZATION}:DelayedScalingRecipeState"

# Where in TE's source, and what must be there: what te.py or this file could not do without.
FACTS: list[tuple[str, str]] = [
    # A module whose fp8_meta has the key is not registered, so TE never updates its scales.
    (f"{MANAGER}.add_fp8_tensors_to_global_buffer", "index_in_buffer = cls.get_buffer_info()"),
    (f"{MANAGER}.add_fp8_tensors_to_global_buffer", "if index_in_buffer in fp8_meta: return"),
    (f"{BASE}.get_extra_state", "k != 'buffer_index_and_autocast_key'"),
    # Buffers: one scale and one column of amaxes per operand, cast for through views of them.
    (f"{DELAYED_STATE}.__init__", "self.scale = torch.ones(num_quantizers, dtype=torch.float32"),
    (
        f"{DELAYED_STATE}.__init__",
        "self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers,",
    ),
    (
        f"{DELAYED_STATE}.make_quantizers",
        "Float8Quantizer(self.scale[i], self.amax_history[0][i].reshape((1,)), self.dtype)",
    ),
    (f"{BASE}.set_meta_tensor", "self.fp8_meta['num_gemms'] * 3 if fwd else"),
    (f"{BASE}.set_meta_tensor", "'scaling_fwd' if fwd else 'scaling_bwd'"),
    # Buffers made before the forward pass are kept by it, and made inside an autocast.
    (f"{BASE}.prepare_forward", "self.init_fp8_metadata(num_gemms=num_gemms)"),
    (f"{BASE}.init_fp8_metadata", "FP8GlobalStateManager.get_fp8_recipe() == _original_recipe"),
    (f"{BASE}.init_fp8_metadata", "fp8 = FP8GlobalStateManager.is_fp8_enabled()"),
    # TE's own updates: at the exit of the outermost autocast, after the first module's backward.
    (
        f"{MANAGER}.autocast_exit",
        "if enabled and qstate.autocast_depth == 0 and (not _graph) and torch.is_grad_enabled():"
        "cls.reduce_and_update_fp8_tensors(forward=True)",
    ),
    (
        "pytorch/module/linear.py:_Linear.backward",
        "FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)",
    ),
    # Parameters are read by name at each call, so others can be lent.
    (f"{LINEAR}.__init__", "self.weight_names = ['weight'] self.bias_names = ['bias']"),
    (f"{NORM_LINEAR}.__init__", "self.weight_names = ['weight'] self.bias_names = ['bias']"),
    (f"{NORM_LINEAR}.__init__", "self.register_parameter('layer_norm_weight',"),
    (f"{NORM_LINEAR}.__init__", "self.register_parameter('layer_norm_bias',"),
    (f"{NORM_MLP}.__init__", "self.register_parameter('layer_norm_weight',"),
    (f"{NORM_MLP}.__init__", "self.register_parameter('layer_norm_bias',"),
    (f"{NORM_MLP}.__init__", "self.register_parameter('fc1_weight',"),
    (f"{NORM_MLP}.__init__", "self.register_parameter('fc1_bias',"),
    (f"{NORM_MLP}.__init__", "self.register_parameter('fc2_weight',"),
    (f"{NORM_MLP}.__init__", "self.register_parameter('fc2_bias',"),
    (f"{NORM_MLP}.__init__", "fc1_output_features = 2 * self.size_per_partition"),
    (f"{LINEAR}._get_weight_tensors", "[getattr(self, name) for name in self.weight_names]"),
    (f"{NORM_MLP}.forward", "fc1_weight, fc2_weight = self._get_weight_tensors()"),
    # Which operand has which index.
    (f"{LINEAR}._get_quantizers", "self.quantizers['scaling_bwd'][FP8BwdTensorIdx.GRAD_OUTPUT1]"),
    (
        f"{NORM_MLP}._get_quantizers",
        "fc2_input_quantizer = self.quantizers['scaling_fwd'][FP8FwdTensorIdx.GEMM2_INPUT]",
    ),
    (
        f"{NORM_MLP}._get_quantizers",
        "fc2_grad_output_quantizer = "
        "self.quantizers['scaling_bwd'][FP8BwdTensorIdx.GRAD_OUTPUT2]",
    ),
    # Weights are quantized for one call (None), or again (True), or not (False).
    (f"{LINEAR}.forward", "None if is_first_microbatch is None or self.is_fsdp2 else 'weight'"),
    (
        "pytorch/module/linear.py:_linear_forward_impl",
        "update_ws = is_first_microbatch is None or is_first_microbatch",
    ),
    # Dtypes and shapes.
    (f"{BASE}.set_activation_dtype", "if torch.is_autocast_enabled():"),
    (
        "pytorch/utils.py:assert_dim_for_fp8_exec",
        "math.prod(tensor.shape[:-1]) % 8 != 0 or tensor.shape[-1] % 16 != 0",
    ),
    # What a recipe's options reach: of current scaling the customization, of blocks the state.
    (f"{LINEAR}._customize_quantizers_float8_current_scaling", "fp8_quant_fwd_inp.power_2_scale"),
    (f"{LINEAR}._customize_quantizers_float8_current_scaling", "fp8_quant_fwd_inp.amax_epsilon"),
    (f"{NORM_MLP}._customize_quantizers_float8_current_scaling", "fp8_quant_bwd_grad.amax_epsilon"),
    (
        f"{QUANTIZATION}:Float8BlockScalingRecipeState.make_quantizers",
        "force_pow_2_scales=qparams.power_2_scale",
    ),
    # Graphs are freed by their backward pass.
    ("pytorch/quantized_tensor.py:restore_from_func_ctx", "ctx.tensor_objects = None"),
    # The norms, and what is imported from where.
    ("pytorch/ops/basic/layer_norm.py:LayerNorm.__init__", "self.eps: float = eps"),
    ("pytorch/ops/basic/rmsnorm.py:RMSNorm.__init__", "self.eps: float = eps"),
    ("pytorch/ops/op.py:BasicOperation", "def get_extra_state(self)"),
    ("pytorch/__init__.py:", "from transformer_engine.pytorch.module import LayerNormLinear"),
    ("pytorch/__init__.py:", "from transformer_engine.pytorch.module import Linear"),
    ("pytorch/__init__.py:", "from transformer_engine.pytorch.module import LayerNormMLP"),
    ("pytorch/__init__.py:", "from transformer_engine.pytorch.module import LayerNorm"),
    ("pytorch/__init__.py:", "from transformer_engine.pytorch.module import RMSNorm"),
    ("pytorch/__init__.py:", "from transformer_engine.pytorch.quantization import autocast"),
] + [
    ("pytorch/module/layernorm_mlp.py:_get_act_func_supported_list", f"'{name}': (tex.{name},")
    for name in ("gelu", "srelu", "swiglu")
]


class Source:
    """TE's Python source, read and not imported. A place in it is "file.py:Class.method"."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self._trees: dict[str, ast.Module] = {}

    def node(self, where: str) -> Any:
        """The definition at `where`; a KeyError if there is none."""
        file, _, path = where.partition(":")
        if file not in self._trees:
            self._trees[file] = ast.parse((self.root / file).read_text())
        node: Any = self._trees[file]
        for name in filter(None, path.split(".")):
            found = [child for child in node.body if getattr(child, "name", None) == name]
            if not found:
                raise KeyError(where)
            node = found[0]
        return node

    def says(self, where: str, piece: str) -> bool:
        """Whether the code at `where` contains `piece`, white space aside."""
        return "".join(piece.split()) in "".join(ast.unparse(self.node(where)).split())

    def signature(self, where: str) -> inspect.Signature:
        """How the function at `where` is to be called."""
        a = self.node(where).args
        bare = [None] * (len(a.posonlyargs + a.args) - len(a.defaults))
        kind = inspect.Parameter
        found = [(n, d, kind.POSITIONAL_OR_KEYWORD) for n, d in zip(a.args, bare + a.defaults)]
        found += [(a.vararg, None, kind.VAR_POSITIONAL)] if a.vararg else []
        found += [(n, d, kind.KEYWORD_ONLY) for n, d in zip(a.kwonlyargs, a.kw_defaults)]
        found += [(a.kwarg, None, kind.VAR_KEYWORD)] if a.kwarg else []
        return inspect.Signature(
            [kind(n.arg, k, default=kind.empty if d is None else _value(d)) for n, d, k in found]
        )

    def assigned(self, where: str, name: str) -> ast.expr:
        """What is assigned to `name` in the body at `where`."""
        for statement in self.node(where).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
                return statement.value
        raise KeyError(f"{where}:{name}")


def _value(node: ast.expr) -> Any:
    """A default; `...` where it is no literal."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ...


class Call(NamedTuple):
    """A forward pass of a TE module."""

    module: Module
    is_first_microbatch: bool | None
    recipe: Any
    dtype: torch.dtype  # of the input
    shape: tuple[int, ...]
    autocast: torch.dtype | None  # torch.autocast's, if one is open


@dataclass
class StandIn:
    """What was asked of TE, and TE's global state."""

    source: Source
    made: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # class, arguments
    calls: list[Call] = field(default_factory=list)
    casts: list[tuple[Module, str]] = field(default_factory=list)  # operand: gemm1_weight, ...
    depth: int = 0
    enabled: bool = False
    recipe: Any = None
    is_first_module: bool = False
    registered: list[DelayedState] = field(default_factory=list)

    def bind(self, where: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments by name, defaults included, if the function at `where` takes them.

        Raises:
            TypeError: it does not.
        """
        bound = self.source.signature(where).bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments.pop("self", None)
        return dict(bound.arguments)

    def update(self, forward: bool) -> None:
        """TE's own update of scales: of the modules that are registered."""
        for state in self.registered:
            if state.forward == forward:
                state.update()


NOW: StandIn  # set by `installed`


class FP8GlobalStateManager:
    """Of TE's, what te.py and the modules here use."""

    @classmethod
    def get_buffer_info(cls) -> str:
        """The string that TE's source returns."""
        key: str = ast.literal_eval(NOW.source.node(f"{MANAGER}.get_buffer_info").body[-1].value)
        return key


class autocast:
    """TE's `autocast`: FP8 on or off, and the recipe."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = NOW.bind(f"{QUANTIZATION}:autocast.__init__", self, *args, **kwargs)
        self._enabled, self._recipe = given["enabled"], given["recipe"]

    def __enter__(self) -> autocast:
        self._saved = NOW.enabled, NOW.recipe, NOW.is_first_module
        NOW.enabled, NOW.recipe = self._enabled, self._recipe
        NOW.is_first_module = NOW.is_first_module or NOW.depth == 0
        NOW.depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        NOW.enabled, NOW.recipe, NOW.is_first_module = self._saved
        NOW.depth -= 1
        if self._enabled and NOW.depth == 0 and torch.is_grad_enabled():
            NOW.update(forward=True)


class DelayedState:
    """`DelayedScalingRecipeState`, and TE's update of it; the other recipes leave it as it is."""

    def __init__(self, recipe: Any, forward: bool, slots: int) -> None:
        self.recipe, self.forward = recipe, forward
        self.scale = torch.ones(slots, dtype=torch.float32)
        length = recipe.amax_history_len if recipe.delayed() else 1
        self.amax_history = torch.zeros(length, slots, dtype=torch.float32)

    def update(self) -> None:
        """`_amax_and_scale_update`, as TE's source has it in Python."""
        history, recipe = self.amax_history, self.recipe
        amax = history.amax(0) if recipe.amax_compute_algo == "max" else history[0].clone()
        history.copy_(history.roll(-1, 0))
        history[0] = 0
        limit = recipe.fp8_format.value
        scale = (limit.max_fwd if self.forward else limit.max_bwd) / amax / 2**recipe.margin
        self.scale.copy_(torch.where((amax > 0) & amax.isfinite(), scale, self.scale))


class Operand(NamedTuple):
    """FP8 values of a matrix for a GEMM over its columns, and (transposed) one over its rows."""

    along: Tensor
    across: Tensor
    inverse: Tensor


class Quantizer:
    """Casts one operand of one GEMM as the recipe says."""

    def __init__(self, module: Module, gemm: int, kind: str) -> None:
        forward = kind != "grad_output"
        self.operand, self.kind = f"gemm{gemm}_{kind}", kind
        self.state = module.fp8_meta["scaling_fwd" if forward else "scaling_bwd"]
        self.recipe = recipe = module.fp8_meta["recipe"]
        hybrid = recipe.fp8_format.name == "HYBRID"
        self.format = "e5m2" if hybrid and not forward else "e4m3"
        types_of = "_FWD_DEFAULT_TENSOR_TYPES" if forward else "_BWD_DEFAULT_TENSOR_TYPES"
        index = _index(NOW.source, types_of, kind, gemm)
        self.scale = self.state.scale[index]
        self.amax = self.state.amax_history[0][index]
        names = {"input": "fwd_inp", "weight": "fwd_weight", "grad_output": "bwd_grad"}
        self.options = getattr(recipe, f"fp8_quant_{names[kind]}", None)

    def __call__(self, x: Tensor) -> Operand:
        recipe, one = self.recipe, torch.ones(())
        if recipe.delayed() or recipe.float8_current_scaling():
            amax = numerics.amax(x)
            if recipe.delayed():
                scale = self.scale.clone()
                self.amax.copy_(torch.fmax(self.amax, amax))  # in evaluation, too
            else:
                power, eps = self.options.power_2_scale, self.options.amax_epsilon
                scale = numerics.tensor_scale(amax, self.format, power_of_two=power, eps=eps)
            values = numerics.cast_to_fp8(x, scale, self.format).float()
            return Operand(values, values.t().contiguous(), 1 / scale)
        # One copy is not the transpose of the other.
        return Operand(self._blocks(x), self._blocks(x.t().contiguous()), one)

    def _blocks(self, x: Tensor) -> Tensor:
        if self.recipe.mxfp8():
            return numerics.dequantize_mxfp8(*numerics.quantize_mxfp8(x, -1, self.format))
        block = (128, 128) if self.kind == "weight" else (1, 128)
        power = self.options.power_2_scale
        return numerics.dequantize_blocks(
            *numerics.quantize_blocks(x, block, self.format, power), block
        )


def _index(source: Source, types_of: str, kind: str, gemm: int) -> int:
    """Where in a module's buffers TE's source puts an operand of its first or second GEMM."""
    order = ast.literal_eval(source.assigned(f"{QUANTIZATION}:RecipeState", types_of))
    return len(order) * (gemm - 1) + int(order.index(kind))


class _Multiply(torch.autograd.Function):
    """One of a module's GEMMs, with both its gradients, as TE's modules have them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Any) -> Tensor:
        module, number, first, dtype, out_dtype = gemm
        x_fp8 = module.quantize(x, number, "input")
        w_fp8 = module.quantize_weight(weight, number, first)
        y = x_fp8.along @ w_fp8.along.t() * (x_fp8.inverse * w_fp8.inverse)
        if bias is not None:
            y += bias.to(dtype).float()
        ctx.save_for_backward(x_fp8.across, x_fp8.inverse, w_fp8.across, w_fp8.inverse)
        ctx.tensor_objects, ctx.gemm = True, gemm
        # The first module of an autocast is to update at the end of its backward pass.
        ctx.updates = number == 1 and any(ctx.needs_input_grad) and NOW.is_first_module
        NOW.is_first_module = NOW.is_first_module and not ctx.updates
        return y.to(dtype).to(out_dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.tensor_objects is None:
            raise AttributeError("ctx must have .tensor_objects to restore saved tensors")
        ctx.tensor_objects = None
        x, x_inverse, w, w_inverse = ctx.saved_tensors
        module, number, _, dtype, _ = ctx.gemm
        if len(dy) % (32 if module.fp8_meta["recipe"].mxfp8() else 16):
            raise RuntimeError(f"cuBLAS takes no FP8 operands for a GEMM over {len(dy)} rows")
        with torch.autocast(dy.device.type, enabled=False):
            dy_fp8 = module.quantize(dy, number, "grad_output")
            dx = dw = db = None
            if ctx.needs_input_grad[0]:
                dx = (dy_fp8.along @ w.t() * (dy_fp8.inverse * w_inverse)).to(dtype)
            if ctx.needs_input_grad[1]:
                dw = (dy_fp8.across @ x.t() * (dy_fp8.inverse * x_inverse)).to(dtype)
            if ctx.needs_input_grad[2]:
                db = dy.float().sum(0).to(dtype)
        if ctx.updates:
            NOW.update(forward=False)
        return dx, dw, db, None


class Module(nn.Module):
    """TE's base module."""

    REAL: ClassVar[str]
    GEMMS: ClassVar[int] = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.given = NOW.bind(f"{self.REAL}.__init__", self, *args, **kwargs)
        NOW.made.append((type(self).__name__, self.given))
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.fp8_initialized = False
        self.quantizers: dict[str, Quantizer] = {}
        self._fp8_workspaces: dict[int, Operand] = {}

    def parameter(self, name: str, *shape: int) -> None:
        """Register a parameter of the asked dtype on the asked device."""
        device, dtype = self.given["device"], self.given["params_dtype"]
        empty = torch.empty(*shape, device=device, dtype=dtype)
        self.register_parameter(name, nn.Parameter(empty))

    def get_extra_state(self) -> Tensor:
        """A pickle, as TE's is."""
        return torch.frombuffer(bytearray(pickle.dumps(NOW.recipe)), dtype=torch.uint8)

    def init_fp8_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Make scales, amaxes and quantizers; again only if the recipe changes."""
        given = NOW.bind(f"{BASE}.init_fp8_metadata", self, *args, **kwargs)
        if not NOW.enabled:
            self.fp8_initialized = False
            return
        if self.fp8_initialized and self.fp8_meta["recipe"] == NOW.recipe:
            return
        gemms = given["num_gemms"]
        self.fp8_meta |= {"recipe": NOW.recipe, "num_gemms": gemms}
        self.fp8_meta["scaling_fwd"] = DelayedState(NOW.recipe, True, 3 * gemms)
        self.fp8_meta["scaling_bwd"] = DelayedState(NOW.recipe, False, 2 * gemms)
        for gemm in range(1, gemms + 1):
            for kind in ("input", "weight", "grad_output"):
                quantizer = Quantizer(self, gemm, kind)
                self.quantizers[quantizer.operand] = quantizer
        self.fp8_initialized = True

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Check and prepare as TE does, then `compute`."""
        given = NOW.bind(f"{self.REAL}.forward", self, *args, **kwargs)
        x, first = given["inp"], given["is_first_microbatch"]
        on = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if on else x.dtype
        call = Call(self, first, NOW.recipe, x.dtype, tuple(x.shape), dtype if on else None)
        NOW.calls.append(call)
        for name, parameter in self.named_parameters():
            if parameter.device.type == "meta":
                raise RuntimeError(f"{name} is on the meta device")
            if not on and parameter.dtype != x.dtype:
                raise TypeError("Data types for parameters must match outside of autocast")
        if not NOW.enabled:
            raise NotImplementedError("the stand-in has no GEMM outside of FP8")
        self.init_fp8_metadata(num_gemms=self.GEMMS)
        key = FP8GlobalStateManager.get_buffer_info()
        if NOW.recipe.delayed() and key not in self.fp8_meta:
            self.fp8_meta[key] = []
            NOW.registered += [self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]]
        rows = x.contiguous().view(-1, x.shape[-1])
        weights = [p for p in self._parameters.values() if p is not None and p.ndim == 2]
        for tensor in (rows, *weights):
            least = (32, 32) if NOW.recipe.mxfp8() else (8, 16)
            if tensor.shape[0] % least[0] or tensor.shape[1] % least[1]:
                raise ValueError(f"FP8 execution requires other dims than {list(tensor.shape)}")
        with torch.autocast(x.device.type, enabled=False):
            y = self.compute(rows, first, dtype)
        return y.view(*x.shape[:-1], y.shape[-1])

    def compute(self, x: Tensor, first: bool | None, dtype: torch.dtype) -> Tensor:
        """[rows, in] -> [rows, out] of `dtype`."""
        raise NotImplementedError

    def quantize(self, x: Tensor, gemm: int, kind: str) -> Operand:
        """An operand as FP8, noted."""
        NOW.casts.append((self, f"gemm{gemm}_{kind}"))
        return self.quantizers[f"gemm{gemm}_{kind}"](x)

    def quantize_weight(self, weight: Tensor, gemm: int, first: bool | None) -> Operand:
        """A weight as FP8: for this call, or kept for the calls to come."""
        if first is None:
            return self.quantize(weight, gemm, "weight")
        if first or gemm not in self._fp8_workspaces:
            self._fp8_workspaces[gemm] = self.quantize(weight, gemm, "weight")
        return self._fp8_workspaces[gemm]

    def multiply(
        self,
        x: Tensor,
        number: int,
        prefix: str,
        first: bool | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The GEMM with the weight `<prefix>weight`."""
        weight = getattr(self, f"{prefix}weight")
        bias = getattr(self, f"{prefix}bias") if self.given["bias"] else None
        y: Tensor = _Multiply.apply(x, weight, bias, (self, number, first, dtype, out_dtype or dtype))
        return y

    def fuses_casts(self) -> bool:
        """Whether a norm or an activation hands float32 to the cast, not rounded before."""
        return bool(NOW.recipe.delayed() or NOW.recipe.mxfp8())

    def normalize(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm of an input rounded to `dtype`, computed in float32."""
        scale = self.layer_norm_weight.to(dtype).float()
        x, width, eps = x.to(dtype).float(), x.shape[-1:], self.given["eps"]
        if self.given["normalization"] == "LayerNorm":
            y = F.layer_norm(x, width, scale, self.layer_norm_bias.to(dtype).float(), eps)
        else:
            y = F.rms_norm(x, width, scale, eps)
        return y if self.fuses_casts() else y.to(dtype)

    def make_norm(self, width: int) -> None:
        """The parameters of the norm in front."""
        assert self.given["normalization"] in ("LayerNorm", "RMSNorm")
        self.parameter("layer_norm_weight", width)
        if self.given["normalization"] == "LayerNorm":
            self.parameter("layer_norm_bias", width)


class Linear(Module):
    """`te.Linear`."""

    REAL = LINEAR

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.make_linear()

    def make_linear(self) -> None:
        """The weight and the bias."""
        rows = self.given["out_features"]
        self.parameter("weight", rows, self.given["in_features"])
        if self.given["bias"]:
            self.parameter("bias", rows)

    def compute(self, x: Tensor, first: bool | None, dtype: torch.dtype) -> Tensor:
        """See `Module.compute`. An input that is no `dtype` is quantized as it is."""
        return self.multiply(x, 1, "", first, dtype)


class LayerNormLinear(Linear):
    """`te.LayerNormLinear`."""

    REAL = NORM_LINEAR

    def make_linear(self) -> None:
        """The norm's parameters as well."""
        self.make_norm(self.given["in_features"])
        super().make_linear()

    def compute(self, x: Tensor, first: bool | None, dtype: torch.dtype) -> Tensor:
        """See `Module.compute`."""
        return self.multiply(self.normalize(x, dtype), 1, "", first, dtype)


class LayerNormMLP(Module):
    """`te.LayerNormMLP`."""

    REAL = NORM_MLP
    GEMMS = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        width, hidden = self.given["hidden_size"], self.given["ffn_hidden_size"]
        up = hidden * (2 if self.given["activation"] == "swiglu" else 1)
        self.make_norm(width)
        for name, rows, columns in (("fc1", up, width), ("fc2", width, hidden)):
            self.parameter(f"{name}_weight", rows, columns)
            if self.given["bias"]:
                self.parameter(f"{name}_bias", rows)

    def compute(self, x: Tensor, first: bool | None, dtype: torch.dtype) -> Tensor:
        """See `Module.compute`."""
        out_dtype = torch.float32 if self.fuses_casts() else dtype
        up = self.multiply(self.normalize(x, dtype), 1, "fc1_", first, dtype, out_dtype).float()
        if self.given["activation"] == "gelu":
            hidden = F.gelu(up, approximate="tanh")
        elif self.given["activation"] == "srelu":
            hidden = F.relu(up).square()
        else:
            assert self.given["activation"] == "swiglu"
            gate, value = up.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        return self.multiply(hidden.to(out_dtype), 2, "fc2_", first, dtype)


class _Norm(nn.Module):
    """TE's norms on their own: float32 outside of torch.autocast."""

    REAL: ClassVar[str]
    OPERATION: ClassVar[str]  # the class that takes the rest of the constructor's arguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        outer = NOW.bind(f"{self.REAL}.__init__", self, *args, **kwargs)
        width, options = outer["normalized_shape"], outer["kwargs"]
        given = NOW.bind(f"{self.OPERATION}.__init__", self, width, eps=outer["eps"], **options)
        name = self.REAL.partition(":")[2]
        NOW.made.append((name, given))
        self.eps, self._width = given["eps"], (width,)
        self.weight = nn.Parameter(torch.ones(width, device=given["device"], dtype=given["dtype"]))
        if name == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros_like(self.weight))

    def get_extra_state(self) -> Tensor:
        """A pickle, as TE's may be."""
        return torch.frombuffer(bytearray(pickle.dumps({})), dtype=torch.uint8)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The norm in the weight's dtype, or torch.autocast's."""
        x = NOW.bind("pytorch/ops/op.py:BasicOperation.forward", self, *args, **kwargs)["input"]
        on = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if on else self.weight.dtype
        scale = self.weight.to(dtype).float()
        x = x.to(dtype).float()
        with torch.autocast(x.device.type, enabled=False):
            if isinstance(self, LayerNorm):
                shift = self.bias.to(dtype).float()
                return F.layer_norm(x, self._width, scale, shift, self.eps).to(dtype)
            return F.rms_norm(x, self._width, scale, self.eps).to(dtype)


class LayerNorm(_Norm):
    """`te.LayerNorm`."""

    REAL = "pytorch/module/layernorm.py:LayerNorm"
    OPERATION = "pytorch/ops/basic/layer_norm.py:LayerNorm"


class RMSNorm(_Norm):
    """`te.RMSNorm`."""

    REAL = "pytorch/module/rmsnorm.py:RMSNorm"
    OPERATION = "pytorch/ops/basic/rmsnorm.py:RMSNorm"


def _indices(source: Source, name: str, types_of: str) -> types.SimpleNamespace:
    """`FP8FwdTensorIdx` or `FP8BwdTensorIdx`: TE's names, TE's order."""
    found = {}
    for keyword in source.assigned("pytorch/constants.py:", name).keywords:
        stem = keyword.arg.removeprefix("GEMM")
        gemm = int("".join(filter(str.isdigit, stem)))
        kind = "".join(c for c in stem if not c.isdigit()).strip("_").lower()
        found[keyword.arg] = _index(source, types_of, kind, gemm)
    return types.SimpleNamespace(**found)


@contextmanager
def installed(root: Path = ROOT) -> Iterator[StandIn]:
    """TE, as the source at `root` has it, can be imported; and `fp8stack.backends.te` with it."""
    global NOW
    NOW = StandIn(Source(root))
    file = root / "common/recipe/__init__.py"
    spec = importlib.util.spec_from_file_location("transformer_engine.common.recipe", file)
    assert spec is not None and spec.loader is not None
    recipes = importlib.util.module_from_spec(spec)
    classes = (Linear, LayerNormLinear, LayerNormMLP, LayerNorm, RMSNorm, autocast)
    constants = {
        name: _indices(NOW.source, name, f"_{name[3:6].upper()}_DEFAULT_TENSOR_TYPES")
        for name in ("FP8FwdTensorIdx", "FP8BwdTensorIdx")
    }
    _forget()
    pytorch = _module("transformer_engine.pytorch", **{c.__name__: c for c in classes})
    _module("transformer_engine", pytorch=pytorch)
    _module("transformer_engine.common", recipe=recipes)
    _module("transformer_engine.pytorch.constants", **constants)
    manager = FP8GlobalStateManager
    _module("transformer_engine.pytorch.quantization", FP8GlobalStateManager=manager)
    sys.modules[recipes.__name__] = recipes
    try:
        spec.loader.exec_module(recipes)
        yield NOW
    finally:
        _forget()


def _module(name: str, **contents: Any) -> types.ModuleType:
    """A module that can be imported from now on."""
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update(contents)
    return module


def _forget() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    sys.modules.pop("fp8stack.backends.te", None)
    vars(fp8stack.backends).pop("te", None)
