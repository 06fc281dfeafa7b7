"""A stand-in for Transformer Engine 2.20 (TE) on a CPU, held to TE's own Python source.

TE's compiled extension needs a GPU; its Python source needs only to be read. From it come the
recipes, which are executed, and the signature of all that may be called: an argument that TE does
not have is a TypeError. The modules here keep state as TE's do, and compute with
`fp8stack.numerics`, NVFP4 with TE's own reference in Python; test_te.py checks what they and
the backend assume about TE's code.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import os
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8stack.layers
from bench.gpu.references import nvfp4_reference
from fp8stack import numerics

_SPEC: Any = importlib.util.find_spec("transformer_engine")  # which does not import it
ROOT = Path(_SPEC.submodule_search_locations[0])
QUANTIZATION = "pytorch/quantization.py"
BASE = "pytorch/module/base.py:TransformerEngineBaseModule"
Shapes = Iterator[tuple[str, tuple[int, ...]]]  # parameters by name


_parse = functools.cache(ast.parse)


class Source:
    """TE's Python source, read and not imported. A place in it is "file.py:Class.method"."""

    def __init__(self) -> None:
        self._signatures: dict[str, inspect.Signature] = {}

    def node(self, where: str) -> Any:
        """The definition at `where`; a KeyError if there is none."""
        file, _, path = where.partition(":")
        node: Any = _parse((ROOT / file).read_text())
        for name in filter(None, path.split(".")):
            matches = [child for child in node.body if getattr(child, "name", None) == name]
            if not matches:
                raise KeyError(where)
            node = matches[0]
        return node

    def says(self, where: str, piece: str) -> bool:
        """Whether the code at `where` contains `piece`, white space aside."""
        return "".join(piece.split()) in "".join(ast.unparse(self.node(where)).split())

    def assigned(self, where: str, name: str) -> Any:
        """The expression that is assigned to `name` in the body at `where`."""
        for node in self.node(where).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return node.value
        raise KeyError(f"{where}:{name}")

    def signature(self, where: str) -> inspect.Signature:
        """The signature of the function at `where`."""
        if where not in self._signatures:
            a, kind = self.node(where).args, inspect.Parameter
            plain = [*[None] * (len(a.args) - len(a.defaults)), *a.defaults]
            entries: list[tuple[ast.arg, ast.expr | None, Any]]
            positional = zip(a.args, plain, strict=True)
            entries = [(n, d, kind.POSITIONAL_OR_KEYWORD) for n, d in positional]
            entries += [(a.vararg, None, kind.VAR_POSITIONAL)] if a.vararg else []
            keywords = zip(a.kwonlyargs, a.kw_defaults, strict=True)
            entries += [(n, d, kind.KEYWORD_ONLY) for n, d in keywords]
            entries += [(a.kwarg, None, kind.VAR_KEYWORD)] if a.kwarg else []
            self._signatures[where] = inspect.Signature(
                [kind(n.arg, k, default=_default(d)) for n, d, k in entries]
            )
        return self._signatures[where]

    def index(self, forward: bool, kind: str, gemm: int) -> int:
        """The index in a module's buffers of an operand of its first or second GEMM."""
        name = f"_{'FWD' if forward else 'BWD'}_DEFAULT_TENSOR_TYPES"
        order = ast.literal_eval(self.assigned(f"{QUANTIZATION}:RecipeState", name))
        return len(order) * (gemm - 1) + int(order.index(kind))

    def indices(self, name: str) -> types.SimpleNamespace:
        """`FP8FwdTensorIdx` or `FP8BwdTensorIdx`: "GEMM2_INPUT" or "GRAD_INPUT2" to an index."""
        places = {}
        for key in (word.arg for word in self.assigned("pytorch/constants.py:", name).keywords):
            kind, number = key.removeprefix("GEMM"), key.strip("GEMADINPUTWHORL_")
            kind = kind.replace(number, "").strip("_").lower()
            places[key] = self.index("Fwd" in name, kind, int(number))
        return types.SimpleNamespace(**places)


def _default(node: ast.expr | None) -> Any:
    """The default that an argument has, if any; `...` where it is no literal."""
    try:
        return inspect.Parameter.empty if node is None else ast.literal_eval(node)
    except ValueError:
        return ...


class Call(NamedTuple):
    """A forward pass of a TE module."""

    module: nn.Module
    is_first_microbatch: bool | None
    recipe: Any
    dtype: torch.dtype  # of the input
    shape: tuple[int, ...]
    autocast: torch.dtype | None  # torch.autocast's, if one is open


@dataclass
class StandIn:
    """The calls of TE, and TE's global state."""

    source: Source
    constructed: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # class, arguments
    calls: list[Call] = field(default_factory=list)
    casts: list[tuple[Module, str]] = field(default_factory=list)  # operand: gemm1_weight, ...
    # Module, operand and amax of attention's casts.
    attention_casts: list[tuple[nn.Module, str, float]] = field(default_factory=list)
    no_kernel: bool = False  # whether cuDNN has no kernel for attention
    gemms: int = 0  # that ran
    depth: int = 0
    enabled: bool = False
    recipe: Any = None
    is_first_module: bool = False
    registered: list[State] = field(default_factory=list)

    def bind(self, where: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments by name, defaults included; a TypeError if TE's function takes others."""
        bound = self.source.signature(where).bind(*args, **kwargs)
        bound.apply_defaults()
        return {name: value for name, value in bound.arguments.items() if name != "self"}

    def update(self, forward: bool) -> None:
        """Update the scales of the registered modules, as TE does."""
        for state in self.registered:
            if state.forward == forward:
                state.update()


NOW: StandIn  # set by `installed`


class FP8GlobalStateManager:
    """The methods of TE's class that fp8stack calls."""

    @classmethod
    def get_buffer_info(cls) -> str:
        """The string that TE's source returns."""
        node = NOW.source.node(f"{QUANTIZATION}:FP8GlobalStateManager.get_buffer_info")
        return str(ast.literal_eval(node.body[-1].value))


class autocast:
    """TE's `autocast`: FP8 on or off, and the recipe."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = NOW.bind(f"{QUANTIZATION}:autocast.__init__", self, *args, **kwargs)
        self._enabled, self._recipe = arguments["enabled"], arguments["recipe"]

    def __enter__(self) -> autocast:
        self._saved = NOW.enabled, NOW.recipe, NOW.is_first_module
        NOW.enabled, NOW.recipe = self._enabled, self._recipe
        if torch.compiler.is_compiling() and NOW.recipe.delayed():  # `check_recipe_support`
            raise RuntimeError("DelayedScaling is not supported under torch.compile")
        NOW.is_first_module = NOW.is_first_module or NOW.depth == 0
        NOW.depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        NOW.enabled, NOW.recipe, NOW.is_first_module = self._saved
        NOW.depth -= 1
        if self._enabled and NOW.depth == 0 and torch.is_grad_enabled():
            NOW.update(forward=True)


class State:
    """TE's recipe state of one direction. Recipes without state leave the tensors as they are."""

    def __init__(self, recipe: Any, forward: bool, slots: int) -> None:
        self.recipe, self.forward = recipe, forward
        self.scale = torch.ones(slots, dtype=torch.float32)
        length = recipe.amax_history_len if recipe.delayed() else 1
        self.amax_history = torch.zeros(length, slots, dtype=torch.float32)

    def update(self) -> None:
        """Update the scales as `_amax_and_scale_update` in TE's source does."""
        history, recipe = self.amax_history, self.recipe
        amax = history.amax(0) if recipe.amax_compute_algo == "max" else history[0].clone()
        history.copy_(history.roll(-1, 0))
        history[0] = 0
        formats = recipe.fp8_format.value
        scale = (formats.max_fwd if self.forward else formats.max_bwd) / amax / 2**recipe.margin
        self.scale.copy_(torch.where((amax > 0) & amax.isfinite(), scale, self.scale))


class Operand(NamedTuple):
    """FP8 values of a matrix for a GEMM over its columns and, transposed, one over its rows."""

    rowwise: Tensor
    columnwise: Tensor
    inverse: Tensor


class Quantizer:
    """Casts one operand of one GEMM as the recipe says."""

    def __init__(self, meta: dict[str, Any], gemm: int, kind: str) -> None:
        forward = kind != "grad_output"
        state, self.recipe = meta["scaling_fwd" if forward else "scaling_bwd"], meta["recipe"]
        hybrid = self.recipe.fp8_format.name == "HYBRID"
        self.format = "e5m2" if hybrid and not forward else "e4m3"
        self.block = (128, 128) if kind == "weight" else (1, 128)
        index = NOW.source.index(forward, kind, gemm)
        self.scale, self.amax = state.scale[index], state.amax_history[0][index]
        name = {"input": "fwd_inp", "weight": "fwd_weight", "grad_output": "bwd_grad"}[kind]
        bits = 4 if self.recipe.nvfp4() else 8
        self.options = getattr(self.recipe, f"fp{bits}_quant_{name}", None)

    def __call__(self, x: Tensor) -> Operand:
        if self.recipe.nvfp4():
            return self._fp4(x)
        if not self.recipe.float8_per_tensor_scaling():
            # One copy is not the transpose of the other.
            return Operand(self._blocks(x), self._blocks(x.t().contiguous()), torch.ones(()))
        amax = numerics.amax(x)
        if self.recipe.delayed():
            scale = self.scale.clone()
            self.amax.copy_(torch.fmax(self.amax, amax))  # in evaluation, too
        else:
            power, eps = self.options.power_2_scale, self.options.amax_epsilon
            scale = numerics.tensor_scale(amax, self.format, power_of_two=power, eps=eps)
        values = numerics.cast_to_fp8(x, scale, self.format).float()
        return Operand(values, values.t().contiguous(), 1 / scale)

    def _blocks(self, x: Tensor) -> Tensor:
        if self.recipe.mxfp8():
            return _in_blocks(x, format=self.format, block=(1, 32), scale="e8m0")
        scale = "power_of_two" if self.options.power_2_scale else "float32"
        return _in_blocks(x, format=self.format, block=self.block, scale=scale)

    def _fp4(self, x: Tensor) -> Operand:
        """Cast by TE's reference, with stochastic rounding, which it lacks, from torch's generator.
        A NaN is hidden, as in TE's kernels: `__hmax` leaves it out of the amax."""
        if not len(x):  # which the reference does not take
            return Operand(x.float(), x.t().float(), torch.ones(()))
        reference, options = nvfp4_of_te(), self.options
        x = x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        if options.random_hadamard_transform and x.dtype != torch.bfloat16:
            raise RuntimeError("RHT is only supported for bfloat16 input")
        quantizer = reference.NVFP4QuantizerRef(
            reference.reference_utils.Fp4Formats.E2M1,
            quant_tile_shape=(16, 16) if options.fp4_2d_quantization else (1, 16),
            with_rht=options.random_hadamard_transform,
        )
        drawn = mock.patch.object(reference, "cast_to_fp4x2", _drawn_codes)
        with drawn if options.stochastic_rounding else nullcontext():
            result = quantizer.quantize(x)

        def values(data: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
            codes: Tensor = reference.cast_from_fp4x2(data, torch.float32)
            return codes * scale.float().repeat_interleave(16, 1) * (amax / (6 * 448))

        return Operand(
            values(result.data, result.scale, result.global_amax_row),
            values(result.data_t, result.scale_t, result.global_amax_col),
            torch.ones(()),
        )


@functools.cache
def nvfp4_of_te() -> Any:
    """The module of TE's reference for NVFP4."""
    with nvfp4_reference(ROOT / "pytorch") as module:
        return module


def _drawn_codes(x: Tensor) -> Tensor:
    """Codes of FP4 values drawn from the two neighbours, the nearer the likelier; two to a byte."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    below = (torch.searchsorted(values, x.abs().contiguous(), right=True) - 1).clamp(max=6)
    step = values[below + 1] - values[below]
    codes = below + (torch.rand(x.shape) * step < x.abs() - values[below]) + 8 * (x < 0)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def _gemm(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    NOW.gemms += 1
    return a @ b * scale


class _Multiply(torch.autograd.Function):
    """A linear of a module, with the gradients of its input and parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: Any) -> Tensor:
        module, number, first, dtype, out_dtype = settings
        x_fp8 = module.quantize(x, number, "input")
        w_fp8 = module.quantize_weight(weight, number, first)
        y = _gemm(x_fp8.rowwise, w_fp8.rowwise.t(), x_fp8.inverse * w_fp8.inverse)
        if bias is not None:
            y += bias.to(dtype).float()
        ctx.save_for_backward(x_fp8.columnwise, x_fp8.inverse, w_fp8.columnwise, w_fp8.inverse)
        ctx.tensor_objects, ctx.settings = True, settings
        # The first module of an autocast updates the scales at the end of its backward pass.
        ctx.updates = number == 1 and any(ctx.needs_input_grad) and NOW.is_first_module
        NOW.is_first_module = NOW.is_first_module and not ctx.updates
        return y.to(dtype).to(out_dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.tensor_objects is None:
            raise AttributeError("ctx must have .tensor_objects to restore saved tensors")
        ctx.tensor_objects = None
        x, x_inverse, w, w_inverse = ctx.saved_tensors
        module, number, _, dtype, _ = ctx.settings
        if len(dy) % (32 if _by_32(module.fp8_meta["recipe"]) else 16):
            raise RuntimeError(f"there is no FP8 GEMM over {len(dy)} rows")
        with torch.autocast(dy.device.type, enabled=False):
            dy_fp8 = module.quantize(dy, number, "grad_output")
            dx = dw = db = None
            if ctx.needs_input_grad[0] or type(module) not in (Linear, GroupedLinear):
                # a norm is in front
                dx = _gemm(dy_fp8.rowwise, w.t(), dy_fp8.inverse * w_inverse).to(dtype)
            if ctx.needs_input_grad[1]:
                dw = _gemm(dy_fp8.columnwise, x.t(), dy_fp8.inverse * x_inverse).to(dtype)
            if ctx.needs_input_grad[2]:
                db = dy.float().sum(0).to(dtype)
        if ctx.updates:
            NOW.update(forward=False)
        return dx, dw, db, None


def _by_32(recipe: Any) -> bool:
    return bool(recipe.mxfp8() or recipe.nvfp4())


class Module(nn.Module):
    """TE's base module."""

    REAL: ClassVar[str]  # where its constructor and forward are in TE's source
    GEMMS: ClassVar[int] = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.arguments = NOW.bind(f"{self.REAL}.__init__", self, *args, **kwargs)
        NOW.constructed.append((type(self).__name__, self.arguments))
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.quantizers: dict[str, Quantizer] = {}
        self._fp8_workspaces: dict[int, Operand] = {}
        device, dtype = self.arguments["device"], self.arguments["params_dtype"]
        for name, shape in self.shapes(**self.arguments):
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))

    def shapes(self, **arguments: Any) -> Shapes:
        """The parameters by name."""
        raise NotImplementedError

    def get_extra_state(self) -> Tensor:
        """A pickle, as TE's is."""
        return torch.frombuffer(bytearray(pickle.dumps(NOW.recipe)), dtype=torch.uint8)

    def init_fp8_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Make scales, amaxes and quantizers for the recipe of the autocast around, once."""
        gemms = NOW.bind(f"{BASE}.init_fp8_metadata", self, *args, **kwargs)["num_gemms"]
        if not NOW.enabled or self.fp8_meta.get("recipe") == NOW.recipe:
            return
        self.fp8_meta |= {"recipe": NOW.recipe, "num_gemms": gemms}
        self.fp8_meta["scaling_fwd"] = State(NOW.recipe, True, 3 * gemms)
        self.fp8_meta["scaling_bwd"] = State(NOW.recipe, False, 2 * gemms)
        for gemm in range(1, gemms + 1):
            for kind in ("input", "weight", "grad_output"):
                self.quantizers[f"gemm{gemm}_{kind}"] = Quantizer(self.fp8_meta, gemm, kind)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Check and prepare as TE does, then `compute`."""
        arguments = NOW.bind(f"{self.REAL}.forward", self, *args, **kwargs)
        x, first = arguments["inp"], arguments["is_first_microbatch"]
        dtype = _autocast_dtype(x)
        NOW.calls.append(Call(self, first, NOW.recipe, x.dtype, tuple(x.shape), dtype))
        for name, parameter in self.named_parameters():
            if parameter.device.type == "meta":
                raise RuntimeError(f"{name} is on the meta device")
            if dtype is None and parameter.dtype != x.dtype:
                raise TypeError("Data types for parameters must match outside of autocast")
        if not NOW.enabled:
            raise NotImplementedError("the stand-in has no GEMM outside of FP8")
        self.init_fp8_metadata(num_gemms=self.GEMMS)
        key = FP8GlobalStateManager.get_buffer_info()
        if NOW.recipe.delayed() and key not in self.fp8_meta:
            self.fp8_meta[key] = []
            NOW.registered += [self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]]
        rows = x.contiguous().view(-1, x.shape[-1])
        least = (32, 32) if _by_32(NOW.recipe) else (8, 16)
        for tensor in (rows, *(p for p in self.parameters() if p.ndim == 2)):
            if tensor.shape[0] % least[0] or tensor.shape[1] % least[1]:
                raise ValueError(f"FP8 execution requires other dims than {list(tensor.shape)}")
        with torch.autocast(x.device.type, enabled=False):
            y = self.compute(rows, first, dtype or x.dtype)
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

    def multiply(self, x: Tensor, number: int, prefix: str, *settings: Any) -> Tensor:
        """The linear whose weight is `<prefix>weight`."""
        bias = getattr(self, f"{prefix}bias") if self.arguments["bias"] else None
        weight = getattr(self, f"{prefix}weight")
        y: Tensor = _Multiply.apply(x, weight, bias, (self, number, *settings))
        return y

    def between(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of activations before the cast: where it is fused they are not rounded
        (`activation_helper` in csrc/extensions/activation.cpp)."""
        return torch.float32 if NOW.recipe.delayed() or NOW.recipe.mxfp8() else dtype

    def normalize(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm of an input rounded to `dtype`, computed in float32, and rounded unless its
        kernel casts to FP8 (`layernorm_fwd` in csrc/extensions/normalization.cpp)."""
        by_cudnn = os.environ.get("NVTE_NORM_FWD_USE_CUDNN", "0") != "0"
        tiles = len(x) % 128 == 0 and x.shape[1] % 128 == 0
        fused = NOW.recipe.delayed() or (NOW.recipe.mxfp8() and by_cudnn and tiles)
        normed = _normalize(self, "layer_norm_", x, dtype, self.arguments["eps"])
        return normed if fused else normed.to(dtype)


_no_torch_dynamo: Any = torch._dynamo.disable  # as TE's modules but Linear


class Linear(Module):
    REAL = "pytorch/module/linear.py:Linear"

    def shapes(self, **arguments: Any) -> Shapes:
        return _plain_shapes(arguments)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            raise NotImplementedError("the stand-in has no operator for compiled code")
        return super().forward(*args, **kwargs)

    def compute(self, x: Tensor, first: bool | None, dtype: torch.dtype) -> Tensor:
        return self.multiply(x, 1, "", first, dtype, dtype)


class GroupedLinear(Module):
    """Linears of one size for the splits of the rows, each with quantizers of its own."""

    REAL = "pytorch/module/grouped_linear.py:GroupedLinear"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.GEMMS = self.arguments["num_gemms"]  # type: ignore[misc]

    def shapes(self, **arguments: Any) -> Shapes:
        for number in range(arguments["num_gemms"]):
            for name, shape in _plain_shapes(arguments):
                yield f"{name}{number}", shape

    @_no_torch_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        arguments = NOW.bind(f"{self.REAL}.forward", self, *args, **kwargs)
        self.splits = arguments["m_splits"]
        if self.splits.dtype != torch.int64 or len(self.splits) != self.GEMMS:
            raise ValueError("m_splits is int64, with a number for each GEMM")
        return super().forward(*args, **kwargs)

    def compute(self, x: Tensor, first: bool | None, dtype: torch.dtype) -> Tensor:
        outputs = []
        for number, rows in enumerate(x.split(self.splits.tolist())):
            bias = getattr(self, f"bias{number}") if self.arguments["bias"] else None
            settings = (self, number + 1, first, dtype, dtype)
            weight = getattr(self, f"weight{number}")
            outputs.append(_Multiply.apply(rows, weight, bias, settings))
        return torch.cat(outputs)


class LayerNormLinear(Module):
    REAL = "pytorch/module/layernorm_linear.py:LayerNormLinear"
    forward = _no_torch_dynamo(Module.forward)

    def shapes(self, **arguments: Any) -> Shapes:
        yield from _norm_shapes(arguments["in_features"], arguments["normalization"])
        yield from _plain_shapes(arguments)

    def compute(self, x: Tensor, first: bool | None, dtype: torch.dtype) -> Tensor:
        return self.multiply(self.normalize(x, dtype), 1, "", first, dtype, dtype)


class LayerNormMLP(Module):
    REAL = "pytorch/module/layernorm_mlp.py:LayerNormMLP"
    GEMMS = 2
    forward = _no_torch_dynamo(Module.forward)

    def shapes(self, **arguments: Any) -> Shapes:
        width, hidden = arguments["hidden_size"], arguments["ffn_hidden_size"]
        yield from _norm_shapes(width, arguments["normalization"])
        up = hidden * (2 if arguments["activation"] == "swiglu" else 1)
        yield from _linear_shapes("fc1_", up, width, arguments["bias"])
        yield from _linear_shapes("fc2_", width, hidden, arguments["bias"])

    def compute(self, x: Tensor, first: bool | None, dtype: torch.dtype) -> Tensor:
        between, activation = self.between(dtype), self.arguments["activation"]
        up = self.multiply(self.normalize(x, dtype), 1, "fc1_", first, dtype, between).float()
        if activation == "gelu":
            hidden = F.gelu(up, approximate="tanh")
        elif activation == "srelu":
            hidden = F.relu(up).square()
        else:
            assert activation == "swiglu"
            gate, value = up.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        return self.multiply(hidden.to(between), 2, "fc2_", first, dtype, dtype)


class DotProductAttention(nn.Module):
    """TE's attention in FP8: operands are cast, and computed with in float32."""

    REAL = "pytorch/attention/dot_product_attention/dot_product_attention.py:DotProductAttention"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.arguments = NOW.bind(f"{self.REAL}.__init__", self, *args, **kwargs)
        NOW.constructed.append(("DotProductAttention", self.arguments))
        self.fp8_meta: dict[str, Any] = {}
        self.quantizers: dict[str, AttentionQuantizer] = {}

    def init_fp8_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Make scales, amaxes and quantizers once: all delayed, or with current scaling a state
        for what the third GEMM casts, the softmax and its gradient."""
        gemms = NOW.bind(f"{self.REAL}.init_fp8_metadata", self, *args, **kwargs)["num_gemms"]
        recipe, of_third = NOW.recipe, 0
        if not NOW.enabled or self.fp8_meta.get("global_recipe") == recipe:
            return
        assert gemms == 3
        self.fp8_meta["global_recipe"] = recipe
        if recipe.float8_current_scaling():
            kind = sys.modules["transformer_engine.common.recipe"].DelayedScaling
            recipe, of_third = kind(amax_history_len=1, amax_compute_algo="most_recent"), 2
        forward = State(recipe, True, 3 * (gemms - of_third))
        backward = State(recipe, False, 2 * (gemms - of_third))
        self.fp8_meta |= {"scaling_fwd": forward, "scaling_bwd": backward}
        for operand, name in META.items():
            state, first = (backward, 2) if operand[0] == "d" else (forward, 3)
            place = getattr(NOW.source.indices(f"FP8{name[:3]}TensorIdx"), name[3:])
            place -= first * of_third
            self.quantizers[operand] = AttentionQuantizer(self, operand, state, place)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """[B, T, heads, E] and twice [B, T, groups, E] -> [B, T, heads E]."""
        arguments = NOW.bind(f"{self.REAL}.forward", self, *args, **kwargs)
        q, k, v = (arguments[f"{name}_layer"] for name in ("query", "key", "value"))
        NOW.calls.append(Call(self, self.training, NOW.recipe, q.dtype, tuple(q.shape), None))
        if not (NOW.enabled and NOW.recipe.fp8_dpa):
            raise NotImplementedError("the stand-in has no attention but in FP8")
        self.init_fp8_metadata(num_gemms=3)
        key = FP8GlobalStateManager.get_buffer_info()
        if not NOW.recipe.mxfp8() and key not in self.fp8_meta:
            self.fp8_meta[key] = []
            NOW.registered += [self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]]
        if NOW.no_kernel:
            raise ValueError("No dot product attention backend is available")
        heads, groups, width = q.shape[2], k.shape[2], q.shape[3]
        sizes = tuple(self.arguments[f"num_{name}"] for name in ("attention_heads", "gqa_groups"))
        if (heads, groups) != sizes or self.arguments["kv_channels"] != width:
            raise ValueError(f"made for other heads than {(heads, groups, width)}")
        layout, mask = self.arguments["qkv_format"], self.arguments["attn_mask_type"]
        if (layout, mask) != ("bshd", "causal"):
            raise NotImplementedError("the stand-in has no other form")
        if not all(x.is_contiguous() for x in (q, k, v)):
            raise NotImplementedError("TE would find out how they lie, or copy them")
        if NOW.recipe.mxfp8():
            y = self._by_blocks(q, k, v)
        else:
            y = _Attend.apply(*(x.transpose(1, 2) for x in (q, k, v)), self)
        return y.transpose(1, 2).flatten(2).to(arguments["query_layer"].dtype)

    def _by_blocks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        width = q.shape[3]
        if q.shape[1] % 128 or k.shape[1] % 128 or width % 32 or width > 128:
            raise AssertionError("MXFP8 quantization requires s_q % 128 == 0")
        q, k = (_in_mxfp8(x, -1) for x in (q, k))
        v = _in_mxfp8(v, 1)
        q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


# cpp_extensions/fused_attn.py: META_QKV = FP8FwdTensorIdx.GEMM1_OUTPUT, and so on.
META = {
    "QKV": "FwdGEMM1_OUTPUT",
    "O": "FwdGEMM2_INPUT",
    "S": "FwdGEMM3_OUTPUT",
    "dQKV": "BwdGRAD_OUTPUT1",
    "dO": "BwdGRAD_INPUT2",
    "dP": "BwdGRAD_INPUT3",
}


class AttentionQuantizer:
    """Casts an operand of attention: with current scaling by its own amax, if the state is not
    delayed scaling's for it (its place is before those), else with its scale."""

    def __init__(self, module: DotProductAttention, operand: str, state: State, place: int) -> None:
        self.module, self.operand = module, operand
        self.format = "e5m2" if operand[0] == "d" else "e4m3"
        self.current = place < 0
        self.scale, self.amax = state.scale[max(place, 0)], state.amax_history[0][max(place, 0)]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """The float32 values of casts with a shared scale. TE's kernels keep the largest amax;
        cuDNN, which casts its results, is assumed to write the last."""
        amax = torch.stack([numerics.amax(x) for x in tensors]).amax()
        NOW.attention_casts.append((self.module, self.operand, float(amax)))
        scale = numerics.tensor_scale(amax, self.format) if self.current else self.scale.clone()
        if not self.current:
            keeps_largest = self.operand in ("QKV", "dO")
            self.amax.copy_(torch.fmax(self.amax, amax) if keeps_largest else amax)
        return [numerics.cast_to_fp8(x, scale, self.format).float() / scale for x in tensors]


class _Attend(torch.autograd.Function):
    """`_fused_attn_forward_impl` and `_fused_attn_backward_impl` of [B, H, T, E], and of fewer keys
    and values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, module: DotProductAttention) -> Tensor:
        cast, dtype = module.quantizers, q.dtype
        is_current = cast["QKV"].current
        q, k, v = cast["QKV"](q.float(), k.float(), v.float())
        copies = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        exact = scores.masked_fill(later, -torch.inf).softmax(-1)
        (s,) = cast["S"](exact)
        y = s @ v
        y = y.to(dtype).float() if is_current else cast["O"](y)[0]
        ctx.save_for_backward(q, k, v, exact, y)
        # A later pass may change the scale of S, so TE keeps it; others are read in the backward.
        ctx.module, ctx.s, ctx.copies = module, s, copies
        return y.to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, exact, y = ctx.saved_tensors
        cast, dtype = ctx.module.quantizers, dy.dtype
        (dy,) = cast["dO"](dy.float())
        dv = ctx.s.transpose(-1, -2) @ dy
        ds = exact * (dy @ v.transpose(-1, -2) - (dy * y).sum(-1, keepdim=True))
        (ds,) = cast["dP"](ds)
        dq, dk = ds @ k / q.shape[-1] ** 0.5, ds.transpose(-1, -2) @ q / q.shape[-1] ** 0.5
        dk, dv = (x.unflatten(1, (-1, ctx.copies)).sum(2) for x in (dk, dv))
        gradients = [dq, dk, dv] if cast["QKV"].current else cast["dQKV"](dq, dk, dv)
        return (*(x.to(dtype) for x in gradients), None)


def _in_blocks(x: Tensor, **fields: Any) -> Tensor:
    """The values of a cast to blocks along the last dimension."""
    return numerics.dequantize(numerics.quantize(x, numerics.Quantizer(**fields)))


def _in_mxfp8(x: Tensor, dim: int) -> Tensor:
    """The values of a cast to MXFP8 along `dim`; the gradient is handed through."""
    turned = x.detach().transpose(dim, -1).contiguous()
    rows = turned.view(-1, turned.shape[-1])
    values = _in_blocks(rows, block=(1, 32), scale="e8m0")
    return x + (values.view(turned.shape).transpose(dim, -1) - x.detach().float()).to(x.dtype)


class _Norm(nn.Module):
    """TE's norms on their own, which are operations of its other kind."""

    REAL: ClassVar[str]
    OPERATION: ClassVar[str]  # the class that takes the rest of the constructor's arguments
    weight: nn.Parameter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        outer = NOW.bind(f"{self.REAL}.__init__", self, *args, **kwargs)
        width, options = outer["normalized_shape"], {"eps": outer["eps"], **outer["kwargs"]}
        arguments = NOW.bind(f"{self.OPERATION}.__init__", self, width, **options)
        name = self.REAL.partition(":")[2]
        NOW.constructed.append((name, arguments))
        self.eps = arguments["eps"]
        for parameter, shape in _norm_shapes(width, name):
            fill = torch.zeros if parameter.endswith("bias") else torch.ones
            values = fill(shape, device=arguments["device"], dtype=arguments["dtype"])
            setattr(self, parameter.removeprefix("layer_norm_"), nn.Parameter(values))

    def get_extra_state(self) -> Tensor:
        """A pickle, as TE's may be."""
        return torch.frombuffer(bytearray(pickle.dumps({})), dtype=torch.uint8)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The norm in the weight's dtype, or torch.autocast's."""
        x = NOW.bind("pytorch/ops/op.py:BasicOperation.forward", self, *args, **kwargs)["input"]
        dtype = _autocast_dtype(x) or self.weight.dtype
        with torch.autocast(x.device.type, enabled=False):
            return _normalize(self, "", x, dtype, self.eps).to(dtype)


class LayerNorm(_Norm):
    REAL = "pytorch/module/layernorm.py:LayerNorm"
    OPERATION = "pytorch/ops/basic/layer_norm.py:LayerNorm"


class RMSNorm(_Norm):
    REAL = "pytorch/module/rmsnorm.py:RMSNorm"
    OPERATION = "pytorch/ops/basic/rmsnorm.py:RMSNorm"


def _plain_shapes(arguments: Mapping[str, Any]) -> Shapes:
    rows, columns = arguments["out_features"], arguments["in_features"]
    return _linear_shapes("", rows, columns, arguments["bias"])


def _linear_shapes(prefix: str, rows: int, columns: int, bias: bool) -> Shapes:
    yield f"{prefix}weight", (rows, columns)
    if bias:
        yield f"{prefix}bias", (rows,)


def _norm_shapes(width: int, normalization: str) -> Shapes:
    assert normalization in ("LayerNorm", "RMSNorm")
    yield "layer_norm_weight", (width,)
    if normalization == "LayerNorm":
        yield "layer_norm_bias", (width,)


def _normalize(module: nn.Module, prefix: str, x: Tensor, dtype: Any, eps: float) -> Tensor:
    """Normalize operands rounded to `dtype` in float32: LayerNorm if the module has a bias."""
    values = {name: p.to(dtype).float() for name, p in module._parameters.items() if p is not None}
    weight, bias = values[f"{prefix}weight"], values.get(f"{prefix}bias")
    x, width = x.to(dtype).float(), x.shape[-1:]
    if bias is None:
        return F.rms_norm(x, width, weight, eps)
    return F.layer_norm(x, width, weight, bias, eps)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of torch.autocast, if it is enabled."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@contextmanager
def installed() -> Iterator[StandIn]:
    """Make TE importable in this context, and `fp8stack.layers.te`."""
    global NOW
    NOW = StandIn(Source())
    name = "transformer_engine.common.recipe"
    recipe = types.ModuleType(name)
    classes = (
        *(Linear, GroupedLinear, LayerNormLinear, LayerNormMLP, LayerNorm, RMSNorm),
        DotProductAttention,
    )
    indices = ("FP8FwdTensorIdx", "FP8BwdTensorIdx")
    contents: dict[str, dict[str, Any]] = {
        "": {},
        ".common": {"recipe": recipe},
        ".pytorch": {cls.__name__: cls for cls in (*classes, autocast)},
        ".pytorch.constants": {name: NOW.source.indices(name) for name in indices},
        ".pytorch.quantization": {"FP8GlobalStateManager": FP8GlobalStateManager},
    }
    _forget()
    for suffix, values in contents.items():
        sys.modules[f"transformer_engine{suffix}"] = module = types.ModuleType(suffix)
        vars(module).update(values)
    vars(sys.modules["transformer_engine"])["pytorch"] = sys.modules["transformer_engine.pytorch"]
    sys.modules[name] = recipe
    try:
        # Not by an importer: its bytecode would be taken for a source of the same second and size.
        source = ROOT / "common/recipe/__init__.py"
        exec(compile(source.read_text(), source, "exec"), vars(recipe))
        # A build of torch for CUDA has a cuDNN, which may be too old for attention in FP8.
        with mock.patch.object(torch.backends.cudnn, "version", return_value=None):
            yield NOW
    finally:
        _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    sys.modules.pop("fp8stack.layers.te", None)
    vars(fp8stack.layers).pop("te", None)
