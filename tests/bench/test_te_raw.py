"""Transformer Engine's source agrees with the calls of `bench.gpu.te_modules`."""

from __future__ import annotations

from bench.gpu import te_modules
from tests.support.te.te_quantizers import SOURCE, te_with_quantizers

BLOCKWISE = "pytorch/tensor/float8_blockwise_tensor.py:Float8BlockQuantizer.get_scale_shape"
MANAGER = "pytorch/quantization.py:FP8GlobalStateManager"
FACTS = [
    *[
        ("pytorch/__init__.py:", f"from transformer_engine.pytorch.{home} import {name}")
        for home, names in {
            "tensor": ["Float8Quantizer", "Float8CurrentScalingQuantizer", "MXFP8Quantizer"],
            "module": te_modules.MODULES,
            "quantization": ["is_fp8_available", "is_mxfp8_available", "autocast"],
        }.items()
        for name in names
    ],
    ("pytorch/__init__.py:", "from transformer_engine.pytorch.tensor import Float8BlockQuantizer"),
    ("pytorch/__init__.py:", "import is_fp8_block_scaling_available"),
    ("pytorch/__init__.py:", "constants import CPLoadBalancingStrategy, DType"),
    ("pytorch/constants.py:DType", "kFloat8E4M3 = int(tex.DType.kFloat8E4M3)"),
    ("pytorch/constants.py:DType", "kFloat8E5M2 = int(tex.DType.kFloat8E5M2)"),
    ("pytorch/tensor/storage/float8_tensor_storage.py:", "instance._data = data"),
    ("pytorch/tensor/storage/float8_tensor_storage.py:", "instance._transpose = data_transpose"),
    ("pytorch/tensor/storage/float8_tensor_storage.py:", "instance._scale_inv = fp8_scale_inv"),
    (
        "pytorch/quantization.py:DelayedScalingRecipeState.make_quantizers",
        "Float8Quantizer(self.scale[i], self.amax_history[0][i].reshape((1,)), self.dtype)",
    ),
    (BLOCKWISE, "return (scale_dim0, round_up_to_nearest_multiple(scale_dim1, 4))"),
    (BLOCKWISE, "return (scale_dim1, round_up_to_nearest_multiple(scale_dim0, 4))"),
    (
        "pytorch/tensor/mxfp8_tensor.py:MXFP8Quantizer.get_scale_shape",
        "round_up_to_nearest_multiple(math.prod(shape[:-1]), 128)",
    ),
    # `te_modules.forget` is needed because the key of TE's buffers leaves the algorithm out.
    (f"{MANAGER}.get_unique_autocast_key", "recipe_repr = str(recipe)"),
    (f"{MANAGER}.reset", "cls.quantization_state = FP8GlobalState()"),
    ("pytorch/module/linear.py:Linear.forward", "self._fp8_workspaces.get(cache_name)"),
]


def test_the_source_of_transformer_engine_is_as_the_calls_take_it():
    assert [fact for fact in FACTS if not SOURCE.says(*fact)] == []


def test_recipes_that_differ_in_the_algorithm_alone_are_one_to_transformer_engine():
    with te_with_quantizers():
        texts = {
            str(te_modules.recipe("delayed", amax_compute_algo=algorithm))
            for algorithm in ("max", "most_recent")
        }
    assert len(texts) == 1
