"""`fp8stack plan`: its tables for a model and a machine. test_operations.py compares them with real
steps."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, get_args

import pytest

from fp8stack.model.config import GPTConfig, load_config, plan_for
from fp8stack.planning.operations import IN_COMPUTE_DTYPE, IN_FP32, OPTIMIZERS, operations_of
from fp8stack.planning.plan_table import as_lines, make_table
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, assumed, load_recipe

SMALL = GPTConfig(vocabulary=64, context=32, layers=4, width=64, heads=4)
H100 = Hardware("cuda", (9, 0), cuda_version=(12, 9), has_te=True)


def table(recipe: str, hardware: Hardware = H100, config: GPTConfig = SMALL, **keys: Any):
    backend = keys.pop("backend", "auto")
    accumulate = keys.pop("accumulate", 1)
    plan = plan_for(config, load_recipe(recipe, keys), hardware, backend)
    return make_table(config, plan, RunConfig(model="small", accumulate=accumulate), "here")


def rows(recipe: str, hardware: Hardware = H100, config: GPTConfig = SMALL, **keys: Any):
    """The operations by path and name."""
    planned = table(recipe, hardware, config, **keys)
    return {(operation.path, operation.name): operation for operation in planned.operations}


# The operations


def test_every_operation_is_in_one_of_the_lists_and_every_entry_is_used():
    config = SMALL.model_copy(
        update={"dropout": 0.1, "positions": "rope", "norm": "rmsnorm", "qk_norm": True}
    )
    names = Counter(name for _, name in rows("fp16", config=config))
    names += Counter(name for _, name in rows("delayed"))
    names += Counter(name for _, name in rows("bf16", config=load_config("gpt-nano-moe")))
    assert set(names) == set(IN_COMPUTE_DTYPE) | set(IN_FP32)
    assert not set(IN_COMPUTE_DTYPE) & set(IN_FP32)


def test_experts_are_planned_as_one_layer_and_their_router_is_float32():
    planned = rows("delayed", config=load_config("gpt-nano-moe"))
    router = planned["blocks.0.mlp.router", "fprop"]
    assert (router.operands, router.output) == (("fp32", "fp32"), "fp32")
    assert planned["blocks.0.mlp.experts.up", "dgrad"].operands == ("e5m2", "e4m3")
    assert planned["blocks.0.mlp.experts", "activation"].output == "bf16"
    assert planned["blocks.0.mlp", "dispatch"].output == "bf16"
    assert planned["blocks.0.mlp", "routing"].output == "fp32"
    assert not {path for path, name in planned if name == "positions"}


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp32"])
def test_the_lists_say_what_is_low_and_what_is_float32(recipe):
    for (_, name), operation in rows(recipe).items():
        low = {recipe} if name in IN_COMPUTE_DTYPE else {"fp32"}
        assert {*operation.operands, operation.output} == low
    in_tf32 = rows("tf32", Hardware("cuda", (8, 0)))  # rounds in GEMMs alone
    tf32 = {name for (_, name), operation in in_tf32.items() if "tf32" in operation.operands}
    assert tf32 == {"fprop", "dgrad", "wgrad", "attention"}
    assert {operation.output for operation in in_tf32.values()} == {"fp32"}


@pytest.mark.capability("B5")
@pytest.mark.parametrize(
    ("recipe", "gradient"),
    [
        ("delayed", "e5m2"), ("current", "e5m2"), ("block", "e4m3"), ("mxfp8", "e4m3"),
        ("nvfp4", "e2m1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["te", "torch"])
def test_the_operands_of_fp8_gemms_on_a_gpu_are_fp8_bytes(recipe, gradient, backend):
    hardware = assumed("10.0") if recipe in ("mxfp8", "nvfp4") else H100
    config = SMALL.model_copy(update={"width": 128})  # blocks of the torch backend are 128 wide
    operations = rows(recipe, hardware, config, backend=backend)
    fprop, dgrad, wgrad = (operations["blocks.2.mlp.down", x] for x in ("fprop", "dgrad", "wgrad"))
    element = "e2m1" if recipe == "nvfp4" else "e4m3"
    assert (fprop.operands, fprop.output) == ((element, element), "bf16")
    assert dgrad.operands == wgrad.operands == (gradient, element)
    per_tensor = recipe in ("delayed", "current")
    assert fprop.adds_in == ("fp32, fast" if per_tensor else "fp32")
    assert dgrad.adds_in == wgrad.adds_in == "fp32"
    assert operations["lm_head", "fprop"].operands == ("bf16", "bf16")
    assert operations["lm_head", "fprop"].why == "the recipe says head = false"


def test_gemms_that_torch_does_not_multiply_in_fp4_take_bf16_and_a_weight_is_cast_for_them():
    b200 = assumed("10.0")
    planned = rows("nvfp4_forward_high", b200)
    path = "blocks.0.mlp.up"
    operands = {name: planned[path, name].operands for name in ("fprop", "dgrad", "wgrad")}
    fp4 = ("e2m1", "e2m1")
    assert operands == {"fprop": ("bf16", "bf16"), "dgrad": fp4, "wgrad": fp4}
    assert [planned[path, name].adds_in for name in operands] == ["fp32"] * 3
    casts = [x for x in table("nvfp4_forward_high", b200).casts if x.path == path]
    of_weight = {x.what: (x.source, x.target, x.per) for x in casts if "weight" in x.what}
    assert of_weight == {
        "weight for fprop": ("fp32", "bf16", "step"),
        "weight for dgrad": ("fp32", "e2m1", "step"),
    }
    dequantized = rows("mxfp8", b200, backward="dequantized")[path, "dgrad"]
    assert dequantized.operands == ("bf16", "e4m3 in bf16")


def test_a_norm_within_transformer_engines_module_reads_a_rounded_stream():
    operations = rows("delayed", exclude=("blocks.1.mlp.down",))
    assert operations["blocks.0.mlp_norm", "norm"].operands == ("bf16",)
    assert operations["blocks.0.mlp_norm", "norm"].output == "e4m3"
    assert operations["blocks.1.attention_norm", "norm"].operands == ("bf16",)
    assert operations["blocks.1.mlp_norm", "norm"].operands == ("fp32",)  # not both are in FP8
    assert operations["final_norm", "norm"].operands == ("fp32",)
    alone = rows("delayed", backend="torch")
    assert alone["blocks.0.mlp_norm", "norm"].operands == ("fp32",)


def test_a_step_tells_of_every_optimizer_and_of_compressed_gradients():
    names = get_args(RunConfig.model_fields["optimizer"].annotation)
    assert set(OPTIMIZERS) == set(names)
    plan = plan_for(SMALL, "bf16", H100)
    for name in names:
        operations = operations_of(SMALL, plan, optimizer=name, grad_compression="bf16")
        step = {
            operation.name: operation.operands
            for operation in operations
            if operation.path == "step"
        }
        low = OPTIMIZERS[name][0]
        assert step["optimizer"] == (("fp32",) if low == "fp32" else ("fp32", low))
        assert step["gradient exchange"] == ("bf16",)
    assert "gradient exchange" not in {operation.name for operation in operations_of(SMALL, plan)}


# The printed table


def test_a_step_counts_each_micro_batch_and_casts_of_weights_once():
    planned = table("delayed", backend="torch", accumulate=4)
    linears = 4 * 4
    assert planned.counts("micro-batch")["to_fp8"] == 2 * linears
    assert planned.counts("step")["to_fp8"] == 4 * 2 * linears + linears
    emulated = table("delayed", Hardware("cpu"), accumulate=4)
    assert emulated.counts("step")["to_fp8"] == 4 * 3 * linears
    assert emulated.counts("step")["other"] == 0
    assert as_lines(emulated)[0] == (
        "casts per micro-batch: 48 tensors to FP8, 0 between other dtypes"
    )


def test_the_casts_of_alike_layers_are_one_line():
    lines = as_lines(table("delayed", backend="torch", exclude=("blocks.0.mlp.up",)))
    assert (
        "  blocks.1-3.mlp.up: input fp32 -> bf16 and its gradient back; input bf16 -> e4m3; weight "
        "fp32 -> e4m3, once per optimizer step; bias fp32 -> bf16, once per optimizer step; output "
        "gradient bf16 -> e5m2"
    ) in lines
    assert (
        "  blocks.0.mlp.up: input fp32 -> bf16 and its gradient back; bias fp32 -> bf16, once per "
        "optimizer step, and its gradient back; weight fp32 -> bf16, once per optimizer step, and "
        "its gradient back"
    ) in lines


def test_activation_checkpointing_is_noted_and_a_model_in_fp32_casts_nothing():
    assert as_lines(table("fp32")) == ["casts per micro-batch: none"]
    plan = plan_for(SMALL, "bf16", H100)
    last_lines = {}
    for kind in ("none", "selective", "block"):
        planned = make_table(SMALL, plan, RunConfig(activation_checkpointing=kind), "here")
        last_lines[kind] = as_lines(planned)[-1]
    assert "once more" in last_lines["block"]
    assert "GEMMs and attention left out" in last_lines["selective"]
    assert "once more" not in last_lines["none"]


# The command

DELAYED = "--recipe delayed --capability 9.0"
ARGUMENTS = ("plan", "--model", "gpt2-124m", *DELAYED.split())


def test_the_command_prints_the_plan_of_a_gpu_that_is_not_here(command, capsys):
    assert command(*ARGUMENTS, "--batch", "32", "--accumulate", "2") == 0
    printed = capsys.readouterr().out
    machine = "assumed H200 or H100 (compute capability 9.0)"
    assert printed.startswith(f"machine: {machine}\nplan: delayed,")
    assert "blocks.0-11.mlp.down" in printed
    assert "e5m2 x e4m3" in printed
    assert "casts per optimizer step of 2 micro-batches:" in printed
    assert "vocabulary 50257 is padded to 50272" in printed
    assert max(len(line) for line in printed.splitlines()) < 600
    assert "│" not in printed  # no frames where it is piped


def test_auto_goes_by_the_rates_of_the_gpu_and_phases_without_the_recipe_are_noted(command, capsys):
    assert command(*ARGUMENTS, "--set", "phases=conservative") == 0
    assert "note: recipe 'delayed' runs in no step: phases" in capsys.readouterr().out
    words = ("plan", "--model", "gpt2-124m", "--gpu")
    for gpu, recipe in (("RTX 4090", "delayed"), ("L4", "bf16")):
        assert command(*words, gpu) == 0
        machine, plan, *lines = capsys.readouterr().out.splitlines()
        assert machine == f"machine: assumed {gpu} (compute capability 8.9)"
        assert plan.startswith(f"plan: auto -> {recipe}, ")
        assert any("% of GEMM FLOPs (36 of 49 linears)" in line for line in lines) == (
            recipe == "delayed"
        )
        (predicted,) = (line for line in lines if line.startswith("predicted: a step takes "))
        assert f" ms on {gpu}" in predicted


def test_the_json_has_every_layer(command, capsys):
    assert command(*ARGUMENTS, "--no-te", "--accumulate", "1", "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["plan"]["backend"] == "torch"
    paths = {
        operation["path"] for operation in planned["operations"] if operation["name"] == "fprop"
    }
    assert paths == set(load_config("gpt2-124m").linear_shapes())
    assert {cast["per"] for cast in planned["casts"]} == {"micro-batch", "step"}
    assert planned["in_fp32"] == IN_FP32
    to_fp8 = [cast for cast in planned["casts"] if cast["target"] in ("e4m3", "e5m2")]
    assert planned["casts_per_step"]["to_fp8"] == len(to_fp8)


def test_a_run_file_and_set_are_read_as_a_run_reads_them(command, capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('recipe = "bf16"\n[model_overrides]\nlayers = 2\n')
    sets = ("--set", "recipe_overrides.attention=fp32", "--set", "optimizer=muon")
    assert command("plan", "--config", str(file), "--capability", "8.0", *sets) == 0
    printed = capsys.readouterr().out
    assert "attention: fp32, the recipe says so" in printed
    assert "blocks.0-1.attention " in printed
    assert "orthogonalized in bf16" in printed


def test_torch_runs_where_te_is_installed_and_cannot_do_what_else_is_asked(command, capsys):
    for key, reason in (
        ("compile=true", "--compile: Transformer Engine's modules stay outside of compiled code"),
        ("parallel=fsdp", "--parallel fsdp cannot share out Transformer Engine's layers"),
    ):
        assert command(*ARGUMENTS, "--strict", "--set", key) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[1] == "plan: delayed, FP8 GEMMs by torch's scaled_mm, on cuda"
        assert lines[2] == f"  because {reason}: torch runs"


def test_the_plan_says_whether_a_gpu_trains_compiled_code(command, capsys):
    assert command(*ARGUMENTS, "--no-te") == 0
    assert "because training is compiled (torch.compile)" in capsys.readouterr().out
    assert command(*ARGUMENTS, "--no-te", "--set", "compile=false") == 0
    assert "compile" not in capsys.readouterr().out
    assert command(*ARGUMENTS) == 0
    around = "training is compiled (torch.compile) around Transformer Engine's modules; --backend "
    around += "torch compiles linears as well"
    assert f"{around}, and --no-compile turns" in capsys.readouterr().out
    assert command(*ARGUMENTS, "--backend", "te", "--set", "compile=true") == 0
    assert f"{around}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recipe mxpf8", "Did you mean 'mxfp8'"),
        ("--set recipe_overrides.attention=fp32", "recipe.attention = fp32 needs a recipe by name"),
        ("--capability nine", "no compute capability"),
        ("--gpu H201", "No GPU 'H201'. Did you mean 'H200'?"),
        ("--gpu B300", "For another NVIDIA GPU give its compute capability instead."),
        ("--gpu L4 --capability 9.0", "--gpu L4 has compute capability 8.9, not 9.0"),
        (
            f"{DELAYED} --strict --set phases=conservative",
            "--strict: recipe 'delayed' runs in no step: phases warmup 1 to 50 in fp32, stable",
        ),
        ("--recipe delayed --strict --capability 8.0", "--strict"),
        ("--context 100000", "--context 100000 is more than"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(refused, arguments, message):
    assert message in refused("plan", *arguments.split())
