"""The GPT against independent Hugging Face models, and its configuration, padding and start."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fp8stack.common import presets
from fp8stack.layers import Backend, build_backend
from fp8stack.model.config import ActivationName, GPTConfig, load_config, padded_vocabulary
from fp8stack.model.gpt import GPT
from fp8stack.model.hf.architectures import layout_of
from fp8stack.model.hf.tensors import from_hf
from fp8stack.model.rope import rope_tables
from fp8stack.precision import Hardware, load_recipe, resolve
from tests.support.backend_models import grad, gradients
from tests.support.hf_models import SHAPES, export_to, loaded, random_model

CPU = Hardware("cpu")
RECIPES = ["fp32", "bf16", "fp16", "delayed", "block", "mxfp8"]
TINY = {"vocabulary": 61, "context": 16, "layers": 2, "width": 32, "heads": 4}
MODERN: dict[str, Any] = {
    "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False,
}  # fmt: skip


def backend_for(config: GPTConfig, recipe: str, **options: object) -> Backend:
    plan = resolve(load_recipe(recipe, options), CPU)
    vocabulary = padded_vocabulary(config, plan.vocabulary_multiple)
    return build_backend(plan.for_layers(config.linear_shapes(vocabulary)))


def build(recipe: str = "fp32", seed: int = 0, **shape: object) -> GPT:
    config = GPTConfig.model_validate(TINY | shape)
    return GPT(config, backend_for(config, recipe), seed=seed)


def tokens(batch: int = 3, length: int = 16, vocabulary: int = 61, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (batch, length), generator=generator)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal to `tolerance` of the largest element."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


# Against Hugging Face


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt2 untied", "llama", "llama tied", "llama with bias", "qwen3"]
)
def test_logits_loss_and_gradients_equal_hugging_face(name, tmp_path):
    model = random_model(GPTConfig(**SHAPES[name]))
    reference = loaded(export_to(tmp_path / name, model), attn_implementation="eager")
    inputs = tokens(vocabulary=50)
    assert_close(model(inputs), reference(inputs).logits)
    labels = inputs.clone()
    labels[0, 5:9] = -100
    loss, expected = model(inputs[:, :-1], labels[:, 1:]), reference(inputs, labels=labels).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    of_reference = from_hf(model.config, layout_of(model.config), gradients(reference), "theirs")
    assert of_reference.keys() == gradients(model).keys()
    for parameter, gradient in of_reference.items():
        assert_close(grad(model.get_parameter(parameter)), gradient, 2e-5)


# Presets and sizes

PUBLISHED = {
    "gpt-nano": 918_912, "gpt2-124m": 124_439_808, "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080, "gpt2-1.5b": 1_557_611_200, "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248, "gpt-nano-moe": 2_102_656, "olmoe-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624, "deepseek-16b": 16_375_728_128,
}  # fmt: skip


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_a_preset_has_its_published_parameter_count(name, count):
    assert presets.names("models") == sorted(PUBLISHED)
    config = load_config(name)
    with torch.device("meta"):
        model = GPT(config)
    assert config.parameters() == sum(p.numel() for p in model.parameters()) == count


def test_parameters_counts_combinations_of_options():
    options: dict[str, list] = {key: [False, True] for key in ("qk_norm", "bias", "tied")}
    options |= {"norm": ["layernorm", "rmsnorm"], "activation": ["gelu", "swiglu"]}
    options |= {"positions": ["learned", "rope"], "kv_heads": [None, 1], "mlp_width": [None, 12]}
    small = TINY | {"layers": 1, "width": 8, "heads": 2}
    combinations = list(itertools.product(*options.values()))
    for values in random.Random(0).sample(combinations, 40):
        shape = small | dict(zip(options, values, strict=True))
        config = GPTConfig(**shape)
        with torch.device("meta"):
            model = GPT(config)
        assert config.parameters() == sum(p.numel() for p in model.parameters()), shape
        for path, (inputs, outputs) in config.linear_shapes().items():
            assert model.get_submodule(path).weight.shape == (outputs, inputs), shape


def test_flops_per_token_equal_a_hand_count():
    # 6 x (12 x 7,077,888 + 768 x 50,257) + 6 x 12 x 768 x 1024
    assert load_config("gpt2-124m").flops_per_token() == 797_815_296
    # 6 x (16 x 60,817,408 + 2048 x 128,256) + 6 x 16 x 2048 x 8192
    assert load_config("llama-1b").flops_per_token() == 9_025_093_632


# The start


def test_initial_weights_have_the_stated_deviations():
    model = build(vocabulary=512, width=128, layers=8, init_std=0.05, tied=False, context=256)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        elif parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            std = 0.05 / 4 if residual else 0.05
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < std / 25, name


@pytest.mark.parametrize(
    ("recipe", "tied"), [("bf16", False), ("fp16", True), ("block", False), ("mxfp8", True)]
)
def test_every_recipe_starts_from_the_same_weights_under_the_same_names(recipe, tied):
    torch.manual_seed(3)
    plain = dict(build(tied=tied).named_parameters())
    assert not torch.equal(build(seed=1).get_parameter("lm_head.weight"), plain["embedding.weight"])
    torch.manual_seed(4)  # which the initial weights do not depend on
    low = dict(build(recipe, tied=tied).named_parameters())
    assert list(plain) == list(low)
    for name, parameter in low.items():
        rows = len(plain[name])
        assert torch.equal(parameter[:rows], plain[name]), name
        assert not parameter[rows:].any(), name
        assert parameter.dtype == torch.float32


# The layers


@pytest.mark.parametrize("shape", [{}, MODERN | {"kv_heads": 2}], ids=["gpt2", "llama"])
@pytest.mark.parametrize("recipe", ["fp32", "mxfp8"])
def test_a_token_does_not_influence_the_logits_before_it(recipe, shape):
    model = build(recipe, **shape).eval()
    inputs, changed = tokens(), tokens()
    changed[:, 7] = (changed[:, 7] + 1) % 61
    with torch.no_grad():
        before, after = model(inputs), model(changed)
        loss = model(inputs, changed)
    assert before.dtype == loss.dtype == torch.float32
    assert_close(after[:, :7], before[:, :7], 1e-6)
    assert ((after - before)[:, 7:].abs().amax(dim=(0, 2)) > 1e-5).all()


@pytest.mark.parametrize("activation", get_args(ActivationName))
def test_the_mlp_computes_its_activation_exactly(activation):
    mlp = build(activation=activation).get_submodule("blocks.0.mlp").double()
    p = dict(mlp.named_parameters())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 32, generator=generator, dtype=torch.float64) * 50
    h = x @ p["up.weight"].T + p["up.bias"]
    cubic = math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)
    half = h.shape[1] // 2
    expected = {
        "gelu": lambda: h * (1 + torch.erf(h / math.sqrt(2))) / 2,
        "gelu_tanh": lambda: h * (1 + torch.tanh(cubic)) / 2,
        "relu2": lambda: torch.where(h > 0, h * h, 0.0),
        "swiglu": lambda: h[:, :half] / (1 + torch.exp(-h[:, :half])) * h[:, half:],
    }[activation]()
    assert_close(mlp(x), expected @ p["down.weight"].T + p["down.bias"], 1e-12)


def test_rope_tables_are_float32_and_stay_so_in_a_bfloat16_model():
    model = build(**MODERN, rope_theta=50.0)
    angles = [[t / 50.0 ** (2 * i / 8) for i in range(4)] for t in range(16)]
    tables = rope_tables(model.config, torch.device("cpu"))
    for table, of in zip(tables, (math.cos, math.sin), strict=True):
        assert (table.dtype, table.shape) == (torch.float32, (16, 8))
        half = torch.tensor([[of(a) for a in row] for row in angles])
        expected = torch.cat([-half if of is math.sin else half, half], dim=-1)
        torch.testing.assert_close(table, expected, rtol=0, atol=6e-8)
    model(tokens())
    model.bfloat16()
    assert all(t.dtype == torch.float32 for tables in model._rotations.values() for t in tables)


def test_dropout_is_active_in_training_alone(monkeypatch):
    attend: Any = nn.functional.scaled_dot_product_attention
    rates, drops = list[float](), set[str]()

    def spy(*args, dropout_p, **kwargs):
        rates.append(dropout_p)
        return attend(*args, dropout_p=dropout_p, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    model, plain = build(dropout=0.3), build()
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):  # of the embedding, and of both residual branches
            module.register_forward_hook(
                lambda _, x, y, at=name: drops.update({at} if (y == 0).any() else ())
            )
    assert not torch.equal(model(tokens()), model(tokens()))
    assert rates == [0.3] * 4
    assert drops == {"dropout", "blocks.0.dropout", "blocks.1.dropout"}
    rates.clear()
    assert torch.equal(model.eval()(tokens()), plain(tokens()))
    assert rates == [0.0] * 4


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "delayed"])
def test_terms_and_sums_of_a_bf16_residual_stream_are_rounded(recipe):
    """Against NumPy's sums, rounded by ml_dtypes."""
    config = GPTConfig.model_validate(TINY)
    model = GPT(config, backend_for(config, recipe, residual="bf16"))
    into: dict[str, torch.Tensor] = {}
    gave: dict[str, torch.Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            into[name], gave[name] = inputs[0], output.detach()
            if output.requires_grad and name.startswith("block"):
                output.retain_grad()
                streams.append(output)

        return keep

    streams: list[torch.Tensor] = []
    model.embedding.register_forward_hook(note("embedding"))
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(note(f"block {i}"))
        for child in ("attention", "mlp", "mlp_norm"):
            getattr(block, child).register_forward_hook(note(f"{i} {child}"))
    model(tokens(), tokens(seed=2)).backward()

    def rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)

    def values(x: torch.Tensor) -> npt.NDArray[np.float32]:
        return x.detach().float().numpy()

    expected = rounded(values(gave["embedding"]) + values(model.position_embedding.weight[:16]))
    for i in range(config.layers):
        np.testing.assert_array_equal(values(into[f"block {i}"]), expected)
        expected = rounded(expected + rounded(values(gave[f"{i} attention"])))
        assert into[f"{i} mlp_norm"].dtype == torch.float32
        np.testing.assert_array_equal(values(into[f"{i} mlp_norm"]), expected)
        expected = rounded(expected + rounded(values(gave[f"{i} mlp"])))
        np.testing.assert_array_equal(values(gave[f"block {i}"]), expected)
    assert len(streams) == config.layers
    assert all(stream.dtype == stream.grad.dtype == torch.bfloat16 for stream in streams)
