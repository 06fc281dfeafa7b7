"""The te backend on a CPU: its calls against Transformer Engine's source, its numbers against the
emulator's. What stands for Transformer Engine is in te_stand_in.py."""

from __future__ import annotations

import copy
import operator
import sys
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fp8stack.analysis.conform import gemms, histories
from fp8stack.analysis.conform.checks import Context
from fp8stack.layers import build_backend, fp8_state
from fp8stack.layers.kernels.activations import TRANSFORMER_ENGINES
from fp8stack.model.config import GPTConfig
from fp8stack.model.convert import convert
from fp8stack.model.gpt import MLP
from fp8stack.precision import load_recipe
from tests.support import backend_models
from tests.support.backend_models import (
    CPU,
    H100,
    LINEARS,
    RECIPES,
    TINY,
    adam,
    checkpointed,
    filled,
    grad,
    gradients,
    loss_of,
    machine,
    normal,
    planned,
    same,
    train,
)
from tests.support.cases import case
from tests.support.study_recipes import LAST_BF16, NEAREST, NO_HADAMARD, hadamard
from tests.support.te.te_stand_in import Source

ALL = [*RECIPES, "nvfp4", NEAREST, NO_HADAMARD, LAST_BF16]
IN_ALL_LAYERS = ALL[:-1]
FUSED = {"LayerNormLinear": 2, "Linear": 2, "LayerNormMLP": 2}  # calls of a pass through TINY


pytestmark = pytest.mark.usefixtures("one_thread")


# Models and their training


def gpt(recipe="delayed", backend="te", model=None, **options):
    return backend_models.gpt(recipe, backend, model, hardware=machine(recipe), **options)


class Layers(nn.Module):
    """Layers that do not feed each other: their operands are what they are given."""

    SHAPES: ClassVar = {"a": (32, 96), "b": (64, 32), "c": (96, 64)}

    def __init__(self, backend, transposed):
        super().__init__()
        self.backend = backend
        torch.manual_seed(0)
        for name, (inputs, outputs) in self.SHAPES.items():
            layer = backend.linear(name, inputs, outputs, name != "b")
            if transposed:
                layer.transposed = True
                layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())
            self.add_module(name, layer)
        backend.attach(self)

    def forward(self, xs):
        return [self.get_submodule(name)(x) for name, x in zip(self.SHAPES, xs, strict=True)]


def layers(recipe="delayed", backend="te", transposed=False, **options):
    plan = planned(recipe, backend, machine(recipe), **options).for_layers(Layers.SHAPES)
    return Layers(build_backend(plan), transposed)


def distance(x: Tensor, reference: Tensor) -> float:
    """Relative, in the Euclidean norm."""
    x, reference = x.detach().float(), reference.detach().float()
    return float((x - reference).norm() / reference.norm())


def kinds(te) -> Counter:
    return Counter(type(call.module).__name__ for call in te.calls)


def firsts(te) -> list:
    """`is_first_microbatch` of the calls since the last look."""
    flags = [call.is_first_microbatch for call in te.calls]
    te.calls.clear()
    return flags


def weight_casts(te) -> int:
    """The number of weights quantized since the last look."""
    count = sum(operand.endswith("weight") for _, operand in te.casts)
    te.casts.clear()
    return count


# Transformer Engine's source


# A place in the source, and below it the pieces of code that must be there, split by ||.
RELIED_ON = """
pytorch/quantization.py:FP8GlobalStateManager.add_fp8_tensors_to_global_buffer
    index_in_buffer = cls.get_buffer_info() || if index_in_buffer in fp8_meta: return
pytorch/quantization.py:FP8GlobalStateManager.autocast_exit
    if enabled and qstate.autocast_depth == 0 and (not _graph) and torch.is_grad_enabled():
    cls.reduce_and_update_fp8_tensors(forward=True)
pytorch/quantization.py:check_recipe_support
    if torch.compiler.is_compiling() and isinstance(recipe, DelayedScaling): raise RuntimeError(
pytorch/quantization.py:DelayedScalingRecipeState.__init__
    self.scale = torch.ones(num_quantizers, dtype=torch.float32,
    self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers,
pytorch/quantization.py:DelayedScalingRecipeState.make_quantizers
    Float8Quantizer(self.scale[i], self.amax_history[0][i].reshape((1,)), self.dtype)
pytorch/quantization.py:Float8BlockScalingRecipeState.make_quantizers
    qparams = self.recipe.fp8_quant_fwd_weight || force_pow_2_scales=qparams.power_2_scale
pytorch/quantization.py:_compute_nvfp4_support
    if get_device_compute_capability() >= (10, 0): return (True, '')
pytorch/quantization.py:NVFP4BlockScalingRecipeState.make_quantizers
    if tensor_type in ('grad_output', 'grad_input'): return self.recipe.fp4_quant_bwd_grad
    if tensor_type == 'weight': return self.recipe.fp4_quant_fwd_weight
    return self.recipe.fp4_quant_fwd_inp
    with_rht=qparams.random_hadamard_transform, with_post_rht_amax=qparams.random_hadamard_transform
    with_2d_quantization=qparams.fp4_2d_quantization
    stochastic_rounding=qparams.stochastic_rounding
pytorch/tensor/nvfp4_tensor.py:NVFP4Quantizer.__init__
    with_amax_reduction: bool=False || with_random_sign_mask: bool=True
pytorch/tensor/nvfp4_tensor.py:get_wgrad_sign_vector
    [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
pytorch/custom_recipes/reference_nvfp4.py:NVFP4QuantizerRef.qgemm
    if K % 32 != 0:
common/recipe/__init__.py:NVFP4BlockScaling.__post_init__
    self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=not self.disable_rht
    self.fp4_quant_fwd_weight = QParams(random_hadamard_transform=False
    stochastic_rounding=not self.disable_stochastic_rounding
pytorch/module/base.py:TransformerEngineBaseModule.set_meta_tensor
    num_fp8_tensors = self.fp8_meta['num_gemms'] * 3 if fwd else self.fp8_meta['num_gemms'] * 2
    fp8_meta_tensor_key = 'scaling_fwd' if fwd else 'scaling_bwd'
pytorch/module/base.py:TransformerEngineBaseModule.init_fp8_metadata
    fp8 = FP8GlobalStateManager.is_fp8_enabled()
    if self.fp8_initialized and FP8GlobalStateManager.get_fp8_recipe() == _original_recipe: return
pytorch/module/base.py:TransformerEngineBaseModule.prepare_forward
    self.init_fp8_metadata(num_gemms=num_gemms)
    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
pytorch/module/base.py:TransformerEngineBaseModule.set_activation_dtype
    if torch.is_autocast_enabled(): || raise TypeError(
pytorch/module/base.py:TransformerEngineBaseModule.get_extra_state
    pickle.dumps(state)
pytorch/module/linear.py:Linear.__init__
    self.weight_names = ['weight'] self.bias_names = ['bias']
    self.reset_parameters(defer_init=device == 'meta')
pytorch/module/linear.py:Linear._get_weight_tensors
    unfused_weights = [getattr(self, name) for name in self.weight_names]
pytorch/module/linear.py:Linear._get_quantizers
    input_quantizer = self.quantizers['scaling_fwd'][FP8FwdTensorIdx.GEMM1_INPUT]
    grad_output_quantizer = self.quantizers['scaling_bwd'][FP8BwdTensorIdx.GRAD_OUTPUT1]
pytorch/module/linear.py:Linear._get_weight_quantizers
    weight_quantizer = self.quantizers['scaling_fwd'][FP8FwdTensorIdx.GEMM1_WEIGHT]
pytorch/module/linear.py:Linear._customize_quantizers_float8_current_scaling
    force_pow_2_scales = recipe.fp8_quant_fwd_inp.power_2_scale
    amax_epsilon = recipe.fp8_quant_fwd_weight.amax_epsilon
    amax_epsilon = recipe.fp8_quant_bwd_grad.amax_epsilon
pytorch/module/linear.py:Linear.forward
    cache_name = None if is_first_microbatch is None or self.is_fsdp2 else 'weight'
    torch._dynamo.graph_break(msg=f'te.Linear falling back to eager: {reason}')
pytorch/module/linear.py:Linear._compile_eager_fallback_reason
    if fp8 and is_first_microbatch is not None and (not self.is_fsdp2):
    return 'FP8 weight caching (is_first_microbatch)'
pytorch/module/layernorm_linear.py:LayerNormLinear.forward
    @no_torch_dynamo()
pytorch/module/grouped_linear.py:GroupedLinear.__init__
    self._offsets = {'input': 0, 'weight': 1, 'output': 2, 'grad_output': 0, 'grad_input': 1
    self._num_fp8_tensors_per_gemm = {'fwd': 3, 'bwd': 2} || self.register_parameter(f'weight{i}',
    self.register_parameter(f'bias{i}', || self.reset_parameters(defer_init=is_meta)
pytorch/module/grouped_linear.py:GroupedLinear.forward
    @no_torch_dynamo() || inp = self.prepare_forward(inp, num_gemms=self.num_gemms)
    cache_weight = is_first_microbatch is not None || if m_splits.size() != (num_gemms,):
pytorch/module/grouped_linear.py:GroupedLinear._get_weight_tensors
    grouped_weight = getattr(self, 'weight', None)
    [getattr(self, f'weight{i}') for i in range(self.num_gemms)]
pytorch/module/grouped_linear.py:GroupedLinear._get_bias_tensors
    return [getattr(self, f'bias{i}')
pytorch/module/grouped_linear.py:_GroupedLinear.forward
    m_splits = m_splits.tolist()
    quantize_weight(tensor=weights[i], quantizer=weight_quantizers[i],
pytorch/quantization.py:get_align_size_for_quantization
    if recipe.mxfp8(): return 32 || if recipe.nvfp4(): return 128 || return 16
pytorch/module/linear.py:_linear_forward_impl
    update_ws = is_first_microbatch is None or is_first_microbatch
pytorch/module/linear.py:_linear_backward_impl
    if bwd_args.requires_dgrad:
pytorch/module/linear.py:_Linear.backward
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
pytorch/module/layernorm_linear.py:LayerNormLinear.__init__
    self.weight_names = ['weight'] self.bias_names = ['bias']
    self.register_parameter('layer_norm_weight', || self.register_parameter('layer_norm_bias',
    if self.normalization != 'RMSNorm':
pytorch/module/layernorm_mlp.py:LayerNormMLP.__init__
    assert normalization in ['LayerNorm', 'RMSNorm'] || self.register_parameter('layer_norm_weight',
    self.register_parameter('layer_norm_bias', || self.register_parameter('fc1_weight',
    self.register_parameter('fc1_bias', || self.register_parameter('fc2_weight',
    self.register_parameter('fc2_bias', || fc1_output_features = 2 * self.size_per_partition
pytorch/module/layernorm_mlp.py:LayerNormMLP.forward
    @no_torch_dynamo() || inp = self.prepare_forward(inp, num_gemms=2)
    fc1_bias = self.fc1_bias if self.use_bias else None
pytorch/module/layernorm_mlp.py:LayerNormMLP._get_quantizers
    fc1_input_quantizer = self.quantizers['scaling_fwd'][FP8FwdTensorIdx.GEMM1_INPUT]
    fc2_input_quantizer = self.quantizers['scaling_fwd'][FP8FwdTensorIdx.GEMM2_INPUT]
    fc1_grad_output_quantizer = self.quantizers['scaling_bwd'][FP8BwdTensorIdx.GRAD_OUTPUT1]
    fc2_grad_output_quantizer = self.quantizers['scaling_bwd'][FP8BwdTensorIdx.GRAD_OUTPUT2]
pytorch/module/layernorm_mlp.py:_get_act_func_supported_list
    'gelu': (tex.gelu, || 'srelu': (tex.srelu, || 'swiglu': (tex.swiglu,
common/__init__.py:
    MIN_CUDNN_VERSION = (9, 12, 0)
pytorch/cpp_extensions/fused_attn.py:
    META_QKV = FP8FwdTensorIdx.GEMM1_OUTPUT META_DQKV = FP8BwdTensorIdx.GRAD_OUTPUT1
    META_O = FP8FwdTensorIdx.GEMM2_INPUT META_DO = FP8BwdTensorIdx.GRAD_INPUT2
    META_S = FP8FwdTensorIdx.GEMM3_OUTPUT META_DP = FP8BwdTensorIdx.GRAD_INPUT3
pytorch/attention/dot_product_attention/dot_product_attention.py:
    _dpa_fp8_recipe = os.getenv('NVTE_DPA_FP8_RECIPE', '')
    _dpa_fp8ds_amax_histlen = int(os.getenv('NVTE_DPA_FP8DS_AMAX_HISTLEN', '1'))
pytorch/attention/dot_product_attention/dot_product_attention.py:DotProductAttention.init_fp8_metadata
    if _dpa_fp8_recipe == 'F16': fp8_recipe.fp8_dpa = False
    fp8_recipes = [fp8_recipe, fp8_recipe_dpa]
    if self.fp8_initialized and fp8_recipe_dpa == self.fp8_meta['recipe']: return
pytorch/attention/dot_product_attention/dot_product_attention.py:DotProductAttention.set_meta_tensor
    num_gemms = [2, 1] if len(recipe) == 2 else [3]
    num_fp8_tensors = [x * 3 if fwd else x * 2 for x in num_gemms]
    primary_idx = -1 if len(recipe) == 2 else 0
    self.fp8_meta[fp8_meta_tensor_key] = recipe_states[primary_idx]
pytorch/attention/dot_product_attention/dot_product_attention.py:DotProductAttention.forward
    num_gemms=3 || 'is_training': self.training
    if sum([use_flash_attention, use_fused_attention, use_unfused_attention]) == 0: raise ValueError
pytorch/attention/dot_product_attention/utils.py:get_attention_backend
    if device_compute_capability < (10, 0): logger.debug('Disabling FusedAttention for MXFP8
    if cudnn_version < (9, 21, 0): || elif cudnn_version in ((9, 23, 0), (9, 23, 1)):
    if device_compute_capability == (12, 0):
    if device_compute_capability < (10, 0): logger.debug('Disabling FusedAttention for FP8 current
    if cudnn_version < (9, 14, 0):
    and (device_compute_capability < (9, 0) or cudnn_version < (9, 19, 0))
    if use_flash_attention_3 and is_training:
    logger.debug('Disabling UnfusedDotProductAttention for FP8 attention')
    os.environ.get('NVTE_UnfusedDPA_Emulate_FP8', '0') == '1'
    int(os.environ.get('NVTE_FUSED_ATTN', '1'))
pytorch/attention/dot_product_attention/utils.py:combine_and_quantize
    assert s_q % 128 == 0 and s_kv % 128 == 0 and (d_qk % 32 == 0) and (d_v % 32 == 0)
    qkv = torch.cat([x.view(-1) for x in tensors], dim=0) qkv_fp8 = qkv_quantizer(qkv)
pytorch/attention/dot_product_attention/backends.py:_fused_attn_forward_impl
    fp8_tensors = (q_fp8, k_fp8, v_fp8, None) f16_tensors = (None, None, None, out_f16)
    fp8_tensors = (q_fp8, k_fp8, v_fp8, out_fp8)
    is_bwd_fp8 = fp8 and int(os.getenv('NVTE_FP8_DPA_BWD', '1'))
    S_quantizer.scale = S_quantizer.scale.clone()
pytorch/attention/dot_product_attention/backends.py:
    _dpa_fp8_cs_o_in_f16 = os.getenv('NVTE_DPA_FP8CS_O_in_F16', '1') == '1'
pytorch/quantized_tensor.py:restore_from_func_ctx
    ctx.tensor_objects = None
pytorch/utils.py:assert_dim_for_fp8_exec
    math.prod(tensor.shape[:-1]) % 8 != 0 or tensor.shape[-1] % 16 != 0
pytorch/ops/basic/layer_norm.py:LayerNorm.__init__
    self.eps: float = eps
pytorch/ops/basic/rmsnorm.py:RMSNorm.__init__
    self.eps: float = eps
pytorch/ops/op.py:BasicOperation
    def get_extra_state(self)
pytorch/__init__.py:
    pytorch.module import GroupedLinear || pytorch.module import LayerNormLinear
    pytorch.module import Linear || pytorch.module import LayerNormMLP
    pytorch.module import LayerNorm || pytorch.module import RMSNorm
    pytorch.quantization import autocast || pytorch.attention import DotProductAttention
"""


def test_transformer_engine_still_has_what_the_backend_relies_on():
    source, missing = Source(), []
    for line in RELIED_ON.strip().splitlines():
        if line[0] != " ":
            where = line
        else:
            pieces = line.split(" || ")
            missing += [(where, piece) for piece in pieces if not source.says(where, piece)]
    assert missing == []


def test_modules_are_made_without_memory_and_called_in_autocasts_of_their_own(te):
    loss_of(gpt(model={"norm": "rmsnorm", "bias": False}), 1).backward()
    cores = [(name, arguments) for name, arguments in te.constructed if name[-4:] != "Norm"]
    assert Counter(name for name, _ in cores) == FUSED
    for _, arguments in cores:
        assert (arguments["device"], arguments["params_dtype"]) == ("meta", torch.float32)
        assert arguments["bias"] is False
        assert arguments.get("normalization", "RMSNorm") == "RMSNorm"
    for call in te.calls:  # what was lent was taken back
        assert all(p.device.type == "meta" for p in call.module.parameters())
        names = {"weight", "layer_norm_weight", "fc1_weight", "fc2_weight"}
        assert set(call.module._parameters) <= names
        assert (call.autocast, call.recipe) == (torch.bfloat16, te.calls[0].recipe)
        is_fused = type(call.module).__name__ != "Linear"
        assert call.dtype == (torch.float32 if is_fused else torch.bfloat16)
    assert (te.depth, te.enabled) == (0, False)


# Recipes


TE_RECIPES: list[tuple[str, dict, dict]] = [
    # The window stays out of Transformer Engine.
    ("delayed", {"margin": 3, "history_length": 7, "amax_algorithm": "max"},
     {"margin": 3, "amax_history_len": 1, "amax_compute_algo": "most_recent",
      "reduce_amax": False}),
    ("current", {"quantizer": {"eps": 0.25}, "power_of_two": True},
     {"use_power_2_scales": True} | {
         f"fp8_quant_{x}.amax_epsilon": 0.25 for x in ("fwd_inp", "fwd_weight", "bwd_grad")}),
    ("block", {"power_of_two": False},
     {"use_f32_scales": True, "x_block_scaling_dim": 1, "w_block_scaling_dim": 2,
      "grad_block_scaling_dim": 1}),
    ("mxfp8", {}, {"fp8_format.name": "E4M3", "enable_2d_quantization": False}),
    ("nvfp4", {}, {"row_scaled_activation": False, "nvfp4_4over6": "none",
                   "disable_stochastic_rounding": False}),
]  # fmt: skip
KINDS = {"current": "float8_current_scaling", "block": "float8_block_scaling"}


@pytest.mark.parametrize(("name", "options", "fields"), TE_RECIPES)
def test_fields_that_no_gemm_shows_reach_transformer_engine(te, name, options, fields):
    from fp8stack.layers.te import te_recipe

    quantizers = load_recipe(name, options).quantizers
    assert quantizers is not None
    recipe = te_recipe(quantizers)
    assert getattr(recipe, KINDS.get(name, name))()
    assert {field: operator.attrgetter(field)(recipe) for field in fields} == fields
    assert recipe.backward_override is None
    if name == "current":  # other recipes are left alone
        assert type(recipe)().fp8_quant_fwd_inp.amax_epsilon == 0.0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("delayed", {"backward_format": "e4m3"}),
        ("current", {"power_of_two": True}),
        ("current", {"quantizer": {"eps": 50.0}}),
        ("block", {"power_of_two": False}),
        (NEAREST, hadamard(0)),
        (NEAREST, {"weight": {"block": [1, 16]}}),
        ("nvfp4", {"grad_output": {"rounding": "nearest"}}),
    ],
    ids=str,
)
def test_a_recipes_options_reach_its_gemms(te, planned_for_gpus, name, options):
    """The casts obey the options, beyond the fields that hold them."""
    recipe = load_recipe(name, options)
    facts = gemms.linear(Context(CPU), recipe, "te", gemms.SHAPES[0]).compare()
    assert facts["holds"], facts


@pytest.mark.parametrize("algorithm", histories.ALGORITHMS)
def test_the_state_of_delayed_scaling_is_that_of_plain_python(te, planned_for_gpus, algorithm):
    rows = histories.histories(Context(CPU, quick=True))
    (row,) = (row for row in rows if row.name == f"fp8_state of te, {algorithm}")
    facts = row.compare()
    assert facts["holds"], facts


# Losses against the emulator's


@pytest.mark.capability("B7")
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *(case(name, {}, quick=name in ("delayed", "mxfp8", "nvfp4")) for name in ALL),
        case("delayed", {"residual": "bf16"}, quick=True),
    ],
)
def test_losses_follow_the_emulators(te, recipe, options):
    torch.manual_seed(0)  # of what Transformer Engine draws
    by_te = train(gpt(recipe, **options), range(10))
    expected = train(gpt(recipe, "emulate", **options), range(10))
    assert expected[0] - expected[-1] > 0.5
    # te rounds to bfloat16 where the emulator does not (the residual stream before a norm, biases,
    # weight gradients), an error of 2^-9. That error in the weights changes the emulator's own
    # losses here by up to 0.4 %, in FP4 by up to 0.9 %; other random bits by up to 1.6 %.
    assert by_te == pytest.approx(expected, rel=0.02 if "nvfp4" in recipe else 0.01)
    assert by_te[0] == pytest.approx(expected[0], rel=2**-12)


def test_gradients_are_drawn_by_torchs_generator_and_anew_in_each_backward_pass(te):
    model = layers("nvfp4")

    def gradient():
        xs = [normal(32, n, seed=n).requires_grad_() for n, _ in Layers.SHAPES.values()]
        before = torch.get_rng_state()
        ys = model(xs)
        assert torch.equal(torch.get_rng_state(), before)
        torch.autograd.backward(ys, [normal(*y.shape, seed=9).bfloat16() for y in ys])
        return xs[0].grad

    torch.manual_seed(3)
    first, second = gradient(), gradient()
    assert not torch.equal(first, second)
    assert distance(first, second) < 0.3
    torch.manual_seed(3)
    assert torch.equal(gradient(), first)
    assert {int(v) for v in fp8_state(model).values()} == {0}  # the emulator's, which are kept


@pytest.mark.parametrize("where", ["attention", "its gradient", "an input", "a gradient"])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_nan_that_transformer_engine_would_hide_in_fp4_shows(te, monkeypatch, where, hidden):
    model = gpt("nvfp4", model={"bias": False, "norm": "rmsnorm"})
    backend, alone = model.backend, layers("nvfp4")
    if hidden:
        for changed in (backend, alone.backend):
            monkeypatch.setattr(changed, "hides_nan", False)
    put = torch.tensor(torch.nan)

    def gradient(dy):
        return torch.where(torch.arange(dy.shape[-1]) == 3, put, dy)

    def attention(q, k, v, **options):
        if where == "its gradient":
            q.register_hook(gradient)
        y = type(backend).attention(backend, q, k, v, **options)
        return gradient(y) if where == "attention" else y

    if where in ("attention", "its gradient"):
        monkeypatch.setattr(backend, "attention", attention)
        loss = loss_of(model, 1)
        loss.backward()
        results = [loss, *gradients(model).values()]
    else:
        xs = [normal(32, n, seed=n) for n, _ in Layers.SHAPES.values()]
        if where == "an input":
            xs[0] = gradient(xs[0])
        xs = [x.requires_grad_() for x in xs]
        ys = alone(xs)
        if where == "a gradient":
            ys[0].register_hook(gradient)
        torch.autograd.backward(ys, [normal(*y.shape, seed=9).bfloat16() for y in ys])
        results = [*ys, *map(grad, xs), grad(alone.a.weight)]
    assert all(x.isfinite().all() for x in results) == hidden


# When weights are quantized


@pytest.mark.parametrize("recipe", IN_ALL_LAYERS)
def test_weights_are_quantized_once_for_each_optimizer_step(te, recipe):
    model = gpt(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for micro_batch, first in enumerate((True, False, False)):
            loss_of(model, micro_batch).backward()
            assert firsts(te) == [first] * 6
            assert weight_casts(te) == (8 if first else 0)
        optimizer.step()


@pytest.mark.parametrize("recipe", IN_ALL_LAYERS)
def test_weights_are_quantized_for_themselves_outside_of_training(te, recipe):
    model = gpt(recipe)
    train(model, [0])
    te.calls.clear()
    model.eval()
    loss_of(model, 1)
    model.train()
    with torch.no_grad():
        loss_of(model, 1)
    assert firsts(te) == [None] * 12
    loss_of(model, 1)
    assert firsts(te) == [True] * 6
    with torch.no_grad():
        loss_of(model, 1)
    loss_of(model, 2)
    assert firsts(te) == [None] * 6 + [False] * 6


def test_a_micro_batch_of_another_length_finds_no_stale_weights(te):
    model = gpt("current")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, lengths in enumerate([(16, 13, 16), (13, 16, 13), (16, 16), (13, 13), (16, 13)]):
        for length in lengths:
            fresh = gpt("current")
            fresh.load_state_dict(model.state_dict())
            loss = loss_of(model, step, length)
            assert loss.item() == loss_of(fresh, step, length).item(), (step, lengths)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# Fusion


def block_calls(te, options=None, **model):
    """The number of calls of each TE module in a pass through one block."""
    te.calls.clear()
    loss_of(gpt("current", model={"layers": 1} | model, **(options or {})), 1)
    return kinds(te)


@pytest.mark.parametrize(("activation", "te_name"), TRANSFORMER_ENGINES.items())
@pytest.mark.parametrize(("norm", "te_norm"), [("layernorm", "LayerNorm"), ("rmsnorm", "RMSNorm")])
def test_norms_and_activations_are_fused(te, norm, te_norm, activation, te_name):
    bias = norm == "layernorm"
    calls = block_calls(te, norm=norm, activation=activation, bias=bias)
    assert calls == {"LayerNormLinear": 1, "Linear": 1, "LayerNormMLP": 1}
    mlp = next(arguments for name, arguments in te.constructed if name == "LayerNormMLP")
    assert (mlp["normalization"], mlp["activation"]) == (te_norm, te_name)
    assert (mlp["hidden_size"], mlp["ffn_hidden_size"], mlp["bias"]) == (32, 128, bias)


def test_what_transformer_engine_has_no_module_for_is_not_fused(te):
    assert block_calls(te, activation="gelu") == {"LayerNormLinear": 1, "Linear": 3}
    assert block_calls(te, bias=False) == {"Linear": 4}  # a LayerNorm without a bias
    for name in ("up", "down"):
        calls = block_calls(te, options={"exclude": (f"*.mlp.{name}",)})
        assert calls == {"LayerNormLinear": 1, "Linear": 2}
    assert block_calls(te, options={"exclude": ("*.qkv",)}) == {"Linear": 1, "LayerNormMLP": 1}


def test_rows_that_need_padding_are_not_fused(te):
    for recipe, length in (("current", 13), ("mxfp8", 8), ("nvfp4", 8)):  # 26 and 16 rows
        model = gpt(recipe)
        te.calls.clear()
        loss_of(model, 1, length)
        assert kinds(te) == {"Linear": 8}
        assert all(call.shape[0] == 32 for call in te.calls)
    te.calls.clear()
    loss_of(gpt("current"), 1, length=8)
    assert kinds(te) == FUSED


@pytest.mark.parametrize("recipe", [*RECIPES, NEAREST])
@pytest.mark.parametrize(
    ("norm", "activation", "bias"),
    [
        ("layernorm", "gelu_tanh", True),
        ("rmsnorm", "gelu_tanh", True),
        ("rmsnorm", "swiglu", False),
        ("layernorm", "relu2", True),
    ],
)
def test_a_fused_module_gives_what_its_parts_give(te, monkeypatch, recipe, norm, activation, bias):
    shape = {"norm": norm, "activation": activation, "bias": bias}
    config = GPTConfig(**TINY | shape)
    plan = planned(recipe, "te").for_layers(config.linear_shapes())

    class Part(nn.Module):
        """A norm and what follows it in a block."""

        def __init__(self, whole_mlp):
            super().__init__()
            self.backend = build_backend(plan)
            torch.manual_seed(0)
            self.inner: nn.Module
            self.norm = self.backend.norm(norm, 32, 2.0, bias)  # an epsilon to be seen
            if whole_mlp:
                self.inner, self.run = MLP(config, self.backend, "blocks.0.mlp"), "norm_mlp"
            else:
                self.inner = self.backend.linear("blocks.0.attention.qkv", 32, 96, bias)
                self.run = "norm_linear"
            with torch.no_grad():  # norms and biases that do something
                for parameter in self.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(normal(*parameter.shape, seed=1, std=0.3))
            self.backend.attach(self)

        def forward(self, x):
            return getattr(self.backend, self.run)(x, self.norm, self.inner)

    def results(whole_mlp, fused):
        model = Part(whole_mlp)
        if not fused:
            monkeypatch.setattr(model.backend, "_fuses", lambda x, norm: False)
        for _ in range(2):  # delayed scaling scales from the second pass on
            model.zero_grad()
            x = normal(2, 16, 32, seed=3, std=2.0).requires_grad_()
            y = model(x)
            y.backward(normal(*y.shape, seed=4, std=0.01).bfloat16())
        return {"y": y, "x": x.grad} | gradients(model)

    for whole_mlp in (False, True):
        te.calls.clear()
        fused = results(whole_mlp, True)
        assert kinds(te) == {"LayerNormMLP" if whole_mlp else "LayerNormLinear": 2}
        unfused = results(whole_mlp, False)
        for name in fused:
            # The residual stream is rounded to bfloat16 before the norm or after it, so an element
            # in 30 rounds to the next FP8 value, a step of 2^-3 at most. A step of FP4 is 2^-1,
            # and a Hadamard transform hands each change to 16 elements.
            most = 0.16 if "nvfp4" in recipe else 0.08
            assert distance(fused[name], unfused[name]) < most, name


# Layers outside FP8


@pytest.mark.parametrize(
    ("options", "in_fp8"),
    [
        ({"exclude_first_blocks": 1}, LINEARS[4:]),
        ({"exclude_last_blocks": 1}, LINEARS[:4]),
        ({"exclude": ("*.down", "*.qkv")}, [LINEARS[i] for i in (1, 2, 5, 6)]),
        ({"head": True}, [*LINEARS, "lm_head"]),
        ({"model": {"mlp_width": 40}}, [LINEARS[i] for i in (0, 1, 4, 5)]),
    ],
    ids=str,
)
def test_a_model_with_exclusions_trains_as_the_emulators(te, options, in_fp8):
    model = gpt(**options)
    assert [name for name, module in model.named_modules() if hasattr(module, "cores")] == in_fp8
    if "model" not in options:  # the emulator takes any size
        expected = train(gpt(backend="emulate", **options), range(4), accumulate=2)
        assert train(model, range(4), accumulate=2) == pytest.approx(expected, rel=0.01)
    slots = {k.rpartition(".")[0].rpartition(".")[0] for k in fp8_state(model)}
    assert slots == set(in_fp8)


# Checkpoints


@pytest.mark.capability("B7")
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_names_and_initial_values_are_the_emulators(te, norm, qk_norm):
    config = {"norm": norm, "qk_norm": qk_norm}
    model, emulated = gpt(model=config), gpt(backend="emulate", model=config)
    assert same(model.state_dict(), emulated.state_dict())
    assert same(fp8_state(model), fp8_state(emulated))
    train(model, range(2))
    train(emulated, range(2))
    assert model.state_dict().keys() == emulated.state_dict().keys()
    assert fp8_state(model).keys() == fp8_state(emulated).keys()
    assert not any("extra_state" in name for name in model.state_dict())
    te_norm = vars(sys.modules["transformer_engine.pytorch"])["LayerNorm"](16, device="cpu")
    assert "_extra_state" in te_norm.state_dict()  # so they would have been there
    assert [n for n, _ in model.named_modules()] == [n for n, _ in emulated.named_modules()]
    assert [n for n, _ in model.named_buffers()] == []


def test_an_autocast_around_a_model_changes_nothing(te):
    plain, around = gpt("current", model={"qk_norm": True}), gpt("current", model={"qk_norm": True})
    expected = loss_of(plain, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(around, 1)
    assert loss.item() == pytest.approx(expected.item(), rel=2**-7)
    assert {call.autocast for call in te.calls} == {torch.bfloat16}


# FP8 GEMMs


FROZEN = {
    "nothing": lambda name: False,
    "weights": lambda name: name.endswith("weight") and "norm" not in name,
    "one weight": lambda name: name == "blocks.1.attention.output.weight",
    "embeddings": lambda name: "embedding" in name,
    "embeddings and norms": lambda name: "embedding" in name or "norm" in name,
}


@pytest.mark.parametrize("length", [16, 13])  # fused or not
@pytest.mark.parametrize("frozen", FROZEN)
def test_gemms_that_ran_are_counted_and_no_others(te, length, frozen):
    model = gpt("current")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name))
    loss_of(model, 1, length).backward()
    trained = te.gemms
    assert model.backend.fp8_gemms() == trained
    with torch.no_grad():
        loss_of(model.eval(), 1, length)
    assert model.backend.fp8_gemms() == te.gemms - trained == 8
    assert model.backend.fp8_gemms() == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gemms_that_run_again_are_counted_again(te, use_reentrant):
    model = checkpointed(gpt("current"), use_reentrant)
    loss_of(model, 1).backward()
    assert model.backend.fp8_gemms() == te.gemms == 4 * 8


# Layers in models that are not ours


def test_a_weight_stored_the_other_way_round_is_multiplied_as_it_should(te):
    straight, turned = layers(), layers(transposed=True)
    for step in range(3):
        for model in (straight, turned):
            xs = [normal(16, n, seed=n).requires_grad_() for n, _ in Layers.SHAPES.values()]
            ys = model(xs)
            torch.autograd.backward(ys, [normal(*y.shape, seed=step).bfloat16() for y in ys])
        if step == 1:
            for model in (straight, turned):
                torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert same(fp8_state(straight), fp8_state(turned))
    for name in "abc":
        weights = [model.get_submodule(name).weight.grad for model in (straight, turned)]
        assert torch.equal(weights[0], weights[1].t())


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_converted_model_trains_as_the_emulators(te, recipe):
    shared, losses = nn.Linear(32, 32), []
    for backend in ("te", "emulate"):
        torch.manual_seed(0)
        layers = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), shared, nn.Tanh(), shared
        model = convert(copy.deepcopy(nn.Sequential(*layers)), planned(recipe, backend, H100))
        optimizer = adam(model)
        for step in range(6):
            optimizer.zero_grad()
            loss = (model(normal(5, 7, 32, seed=step)) - 1).square().mean()  # 35 rows
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if recipe == "delayed":
            assert filled(model, "3") == [6, 6, 6]
    assert losses[:6] == pytest.approx(losses[6:], rel=0.01)
    assert losses[5] < 0.9 * losses[0]


@pytest.mark.parametrize("quiet", ["no_grad", "eval"])
def test_layers_that_do_not_train_leave_no_trace_in_the_state(te, quiet):
    """Part of a model without gradients, or in evaluation mode: as the emulator has it."""

    def state(backend):
        model = gpt("delayed", backend)
        inner = model.blocks[0].forward
        if quiet == "no_grad":
            model.blocks[0].forward = torch.no_grad()(inner)
        else:
            model.blocks[0].eval()
        for step in range(2):
            loss_of(model, step).backward()
        return {k: bool((v != 0).any()) for k, v in fp8_state(model).items() if "amax" in k}

    assert state("te") == state("emulate")


# Whole runs


def checkpoint_tensors(run: Path, step: int) -> dict[str, Tensor]:
    files = sorted((run / f"checkpoints/step-{step:06}").glob("*.safetensors"))
    return {f"{file.stem} {name}": x for file in files for name, x in load_file(file).items()}
