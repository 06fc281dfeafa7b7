"""What runs where: the whole table as data, for every GPU generation, decided on a CPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError

from fp8stack.errors import UserError
from fp8stack.precision import Hardware, Plan, auto_recipe, load_recipe, resolve, rules

FOUR = frozenset({"reference", "emulate", "torch", "te"})
TWO = frozenset({"reference", "emulate"})

CPU = Hardware("cpu")
CPU_BF16 = Hardware("cpu", cpu_bf16=True)


def gpu(
    major: int, minor: int, te: bool = True, cuda: tuple[int, int] | None = (12, 9)
) -> Hardware:
    return Hardware("cuda", (major, minor), has_te=te, cuda_version=cuda)


P100, V100, T4 = gpu(6, 0), gpu(7, 0), gpu(7, 5)
A100, A40, L4 = gpu(8, 0), gpu(8, 6), gpu(8, 9)
H100 = Hardware("cuda", (9, 0), has_te=True)
B200, RTX5090 = gpu(10, 0), gpu(12, 0)

MACHINES = {
    "cpu": CPU,
    "cpu-bf16": CPU_BF16,
    "6.0": P100,
    "7.0": V100,
    "7.5": T4,
    "8.0": A100,
    "8.6": A40,
    "8.9": L4,
    "9.0": H100,
    "10.0": B200,
    "12.0": RTX5090,
}
FP8 = ("delayed", "current", "block", "mxfp8")
RECIPES = ("auto", *FP8, "bf16", "fp16", "fp32", "tf32")

# The table of which recipe runs where, with all four backends built.
#   bf16 ...  this precision runs, in plain torch, as asked (or as "auto" means)
#   !         it runs instead of what was asked: a substitution, with its reason
#   ?         it runs as asked, and something is worth a sentence
#   te        the recipe as asked, natively through TE, other layers in bf16
#   em32 em16 the recipe as asked, emulated with float32 or bfloat16 GEMMs
TABLE = """
asked    cpu   cpu-bf16  6.0    7.0    7.5    8.0    8.6    8.9         9.0         10.0      12.0
auto     fp32  bf16      fp32?  fp16   fp16   bf16   bf16   delayed:te  delayed:te  mxfp8:te  delayed:te
delayed  em32! em32!     fp32!  fp16!  fp16!  bf16!  bf16!  te          te          te        te
current  em32! em32!     fp32!  fp16!  fp16!  bf16!  bf16!  te          te          te        te
block    em32! em32!     fp32!  fp16!  fp16!  bf16!  bf16!  bf16!       te          te        bf16!
mxfp8    em32! em32!     fp32!  fp16!  fp16!  em16!  em16!  em16!       em16!       te        em16!
bf16     bf16? bf16      fp32!  fp16!  fp16!  bf16   bf16   bf16        bf16        bf16      bf16
fp16     fp16? fp16?     fp16   fp16   fp16   fp16   fp16   fp16        fp16        fp16      fp16
fp32     fp32  fp32      fp32   fp32   fp32   fp32   fp32   fp32        fp32        fp32      fp32
tf32     fp32! fp32!     fp32!  fp32!  fp32!  tf32   tf32   tf32        tf32        tf32      tf32
"""  # noqa: E501


@dataclasses.dataclass(frozen=True)
class Cell:
    """What the table says of one recipe on one machine."""

    asked: str
    machine: str
    recipe: str
    backend: str
    native: bool
    compute_dtype: str
    reason: bool
    substituted: bool

    def __str__(self) -> str:
        return f"{self.asked}-{self.machine}"


def cell(asked: str, machine: str, code: str, built: frozenset[str]) -> Cell:
    named, _, how = code.rstrip("!?").rpartition(":")
    recipe = named or asked
    substituted, reason = code.endswith("!"), code[-1] in "!?"
    if how == "te" and "te" not in built:
        return Cell(asked, machine, recipe, "emulate", False, "bf16", True, True)
    if how == "te":
        return Cell(asked, machine, recipe, "te", True, "bf16", False, False)
    if how.startswith("em"):
        dtype = {"em16": "bf16", "em32": "fp32"}[how]
        return Cell(asked, machine, recipe, "emulate", False, dtype, reason, substituted)
    # fp32 on an old GPU for "auto" is what "auto" stands for there, and native; it has a reason.
    native = not reason or asked == "auto"
    return Cell(asked, machine, how, "reference", native, how, reason, substituted)


def cells(built: frozenset[str]) -> list[Cell]:
    header, *rows = (line.split() for line in TABLE.strip().splitlines())
    assert header[1:] == list(MACHINES)
    assert [row[0] for row in rows] == list(RECIPES)
    return [
        cell(row[0], machine, code, built)
        for row in rows
        for machine, code in zip(header[1:], row[1:], strict=True)
    ]


EVERY_CELL = [
    pytest.param(built, each, id=f"{'four' if built == FOUR else 'two'}-{each}")
    for built in (FOUR, TWO)
    for each in cells(built)
]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[[frozenset[str]], None]:
    """Sets which backends count as built."""
    return lambda names: monkeypatch.setattr(rules, "BUILT", frozenset(names))


@pytest.fixture
def four(build: Callable[[frozenset[str]], None]) -> None:
    """All four backends count as built."""
    build(FOUR)


def sentences(made: Plan) -> str:
    return " | ".join(made.reasons)


def names_the_cause(reasons: str, machine: Hardware) -> bool:
    """Whether they name the machine's capability, or what is missing."""
    what = ["CPU"] if machine.capability is None else [".".join(map(str, machine.capability))]
    what += ["CUDA 12.", "Transformer Engine", "TE, not installed", "not built yet"]
    return any(part in reasons for part in what)


# The table


@pytest.mark.parametrize(("built", "expected"), EVERY_CELL)
def test_every_recipe_runs_on_every_machine_as_the_table_says(build, built, expected):
    build(built)
    made = resolve(expected.asked, MACHINES[expected.machine])
    assert made.asked == expected.asked
    assert made.recipe.name == expected.recipe
    assert (made.backend, made.native) == (expected.backend, expected.native)
    assert made.compute_dtype == expected.compute_dtype
    assert made.device == MACHINES[expected.machine].device
    assert made.is_fp8 == (expected.recipe in FP8)
    assert made.scaling == (expected.recipe if expected.recipe in FP8 else "none")


@pytest.mark.parametrize(("built", "expected"), EVERY_CELL)
def test_a_plan_has_reasons_exactly_where_the_table_says(build, built, expected):
    build(built)
    made = resolve(expected.asked, MACHINES[expected.machine])
    assert bool(made.reasons) == expected.reason, made.reasons


@pytest.mark.parametrize(("built", "expected"), [p for p in EVERY_CELL if p.values[1].substituted])
def test_every_substitution_names_the_cause_and_what_runs_instead(build, built, expected):
    build(built)
    made = resolve(expected.asked, MACHINES[expected.machine])
    reasons = sentences(made)
    assert names_the_cause(reasons, MACHINES[expected.machine]), reasons
    assert ("emulated" if made.backend == "emulate" else expected.recipe) in reasons
    if made.loss_scaling:
        assert "loss scaling" in reasons


@pytest.mark.parametrize(("built", "expected"), EVERY_CELL)
def test_strict_refuses_substitutions_and_nothing_else(build, built, expected):
    build(built)
    machine = MACHINES[expected.machine]
    if expected.substituted:
        with pytest.raises(UserError, match="--strict") as caught:
            resolve(expected.asked, machine, strict=True)
        message = str(caught.value)
        assert f"'{expected.asked}'" in message
        assert names_the_cause(message, machine)
        assert "\n" not in message
    else:
        lenient = resolve(expected.asked, machine)
        assert resolve(expected.asked, machine, strict=True) == dataclasses.replace(
            lenient, strict=True
        )


@pytest.mark.parametrize(
    "expected", [each for each in cells(FOUR) if each.backend == "te"], ids=str
)
def test_a_native_cell_without_its_backend_says_that_it_is_not_built_yet(build, expected):
    build(TWO)
    made = resolve(expected.asked, MACHINES[expected.machine])
    assert not made.native
    assert "backend not built yet" in sentences(made)
    assert "emulated by bf16 GEMMs" in sentences(made)


@pytest.mark.parametrize(("built", "expected"), EVERY_CELL)
def test_loss_scaling_is_for_fp16_alone(build, built, expected):
    build(built)
    made = resolve(expected.asked, MACHINES[expected.machine])
    assert made.loss_scaling == (expected.compute_dtype == "fp16")


@pytest.mark.parametrize(("built", "expected"), EVERY_CELL)
def test_the_vocabulary_is_padded_to_what_the_heads_gemm_needs(build, built, expected):
    build(built)
    multiples = {"delayed": 16, "current": 16, "block": 16, "mxfp8": 32, "bf16": 8, "fp16": 8}
    made = resolve(expected.asked, MACHINES[expected.machine])
    assert made.vocabulary_multiple == multiples.get(expected.recipe, 1)


@pytest.mark.parametrize(("built", "expected"), EVERY_CELL)
def test_the_active_precision_says_whether_it_is_emulated(build, built, expected):
    build(built)
    made = resolve(expected.asked, MACHINES[expected.machine])
    suffix = "-emulated" if made.backend == "emulate" else ""
    assert made.precision == expected.recipe + suffix


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (CPU, "fp32"),
        (CPU_BF16, "bf16"),
        (P100, "fp32"),
        (V100, "fp16"),
        (T4, "fp16"),
        (A100, "bf16"),
        (A40, "bf16"),
        (gpu(8, 7), "bf16"),
        (L4, "delayed"),
        (H100, "delayed"),
        (B200, "mxfp8"),
        (gpu(10, 3), "mxfp8"),
        (RTX5090, "delayed"),
        (gpu(12, 1), "delayed"),
    ],
    ids=str,
)
def test_auto_stands_for_the_recipe_of_the_generation(machine, expected):
    assert auto_recipe(machine) == expected
    assert resolve("auto", machine).recipe.name == expected


@pytest.mark.parametrize("machine", [gpu(10, 3), gpu(10, 1)], ids=str)
@pytest.mark.parametrize("asked", FP8)
def test_every_blackwell_10_x_is_as_10_0(four, asked, machine):
    assert resolve(asked, machine) == resolve(asked, B200)


# Backends by name


@pytest.mark.parametrize(
    ("machine", "asked", "backend", "runs"),
    [
        ("9.0", "delayed", "te", "te"),
        ("9.0", "delayed", "torch", "torch"),
        ("9.0", "current", "torch", "torch"),
        ("9.0", "block", "torch", "torch"),
        ("8.9", "current", "te", "te"),
        ("10.0", "mxfp8", "torch", "torch"),
        ("10.0", "block", "te", "te"),
        ("12.0", "delayed", "torch", "torch"),
    ],
)
def test_a_backend_that_can_serve_runs_when_it_is_named(four, machine, asked, backend, runs):
    made = resolve(asked, MACHINES[machine], backend, strict=True)
    assert (made.backend, made.native, made.compute_dtype) == (runs, True, "bf16")
    assert made.reasons == ()


@pytest.mark.parametrize("asked", FP8)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("built", [FOUR, TWO], ids=["four", "two"])
def test_emulation_that_was_asked_for_is_no_substitution(build, built, machine, asked):
    build(built)
    made = resolve(asked, MACHINES[machine], "emulate", strict=True)
    assert (made.recipe.name, made.backend, made.native) == (asked, "emulate", False)
    generation = MACHINES[machine].capability
    bf16 = generation is not None and generation >= (8, 0)
    assert made.compute_dtype == ("bf16" if bf16 else "fp32")


@pytest.mark.parametrize("asked", FP8)
@pytest.mark.parametrize("machine", ["cpu", "8.0", "9.0"])
def test_emulation_that_was_asked_for_is_still_said_in_the_plan(four, machine, asked):
    """Each recipe that is not run natively adds a sentence."""
    assert "emulate" in sentences(resolve(asked, MACHINES[machine], "emulate"))


@pytest.mark.parametrize("asked", FP8)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_reference_backend_replaces_an_fp8_recipe_and_says_so(four, machine, asked):
    made = resolve(asked, MACHINES[machine], "reference")
    dtype = {"cpu": "fp32", "6.0": "fp32", "7.0": "fp16", "7.5": "fp16"}.get(machine, "bf16")
    assert (made.recipe.name, made.backend, made.compute_dtype) == (dtype, "reference", dtype)
    assert not made.is_fp8
    assert "reference backend has no FP8" in sentences(made)
    assert dtype in made.reasons[0].rpartition(":")[2]
    with pytest.raises(UserError, match="reference backend has no FP8"):
        resolve(asked, MACHINES[machine], "reference", strict=True)


@pytest.mark.parametrize("asked", ["bf16", "fp16", "fp32", "tf32"])
def test_a_plain_recipe_is_content_with_the_reference_backend(asked):
    made = resolve(asked, H100, "reference", strict=True)
    assert (made.recipe.name, made.backend, made.native, made.reasons) == (
        asked,
        "reference",
        True,
        (),
    )


@pytest.mark.parametrize("backend", ["te", "torch", "emulate"])
@pytest.mark.parametrize("asked", ["bf16", "fp16", "fp32", "tf32"])
def test_an_fp8_backend_for_a_plain_recipe_is_replaced_by_reference(four, asked, backend):
    made = resolve(asked, H100, backend)
    assert (made.recipe.name, made.backend) == (asked, "reference")
    assert "reference" in sentences(made)
    with pytest.raises(UserError, match="reference"):
        resolve(asked, H100, backend, strict=True)


@pytest.mark.parametrize(
    ("machine", "asked", "backend", "runs", "said"),
    [
        (gpu(9, 0, te=False), "delayed", "te", "torch", "Transformer Engine is not installed"),
        (gpu(10, 0, te=False), "mxfp8", "te", "torch", "Transformer Engine is not installed"),
        (B200, "block", "torch", "te", "torch backend cannot run"),
        (CPU, "delayed", "te", "emulate", "CPU"),
        (CPU, "mxfp8", "torch", "emulate", "CPU"),
        (H100, "mxfp8", "te", "emulate", "9.0"),
        (A100, "mxfp8", "torch", "emulate", "8.0"),
        (A100, "delayed", "te", "reference", "8.0"),
        (T4, "current", "torch", "reference", "7.5"),
        (L4, "block", "te", "reference", "8.9"),
    ],
)
def test_a_backend_that_cannot_serve_is_replaced_and_said(
    four, machine, asked, backend, runs, said
):
    made = resolve(asked, machine, backend)
    assert made.backend == runs
    assert said in sentences(made)
    assert {"emulate": "emulated", "reference": made.compute_dtype}.get(runs, runs) in sentences(
        made
    )
    with pytest.raises(UserError, match="--strict"):
        resolve(asked, machine, backend, strict=True)


@pytest.mark.parametrize("absent", ["te", "torch"])
@pytest.mark.parametrize("asked", ["delayed", "current", "block"])
def test_a_named_backend_that_is_not_built_is_replaced_by_the_other_one(build, absent, asked):
    build(FOUR - {absent})
    other = {"te": "torch", "torch": "te"}[absent]
    made = resolve(asked, H100, absent)
    assert (made.backend, made.native) == (other, True)
    assert f"{absent}: backend not built yet" in sentences(made)
    with pytest.raises(UserError, match="not built yet"):
        resolve(asked, H100, absent, strict=True)


@pytest.mark.parametrize("absent", ["te", "torch"])
def test_a_named_backend_that_is_not_built_yet_names_who_runs_instead(build, absent):
    build(FOUR - {absent})
    made = resolve("delayed", H100, absent)
    assert made.backend in sentences(made)


@pytest.mark.parametrize("asked", ["auto", "delayed", "current", "block"])
def test_strict_is_content_with_any_native_backend_when_none_was_named(build, asked):
    build(FOUR - {"te"})
    made = resolve(asked, H100, strict=True)
    assert (made.backend, made.native) == ("torch", True)


def test_te_comes_before_torch_where_both_can_serve(four):
    assert resolve("delayed", H100).backend == "te"
    assert resolve("delayed", dataclasses.replace(H100, has_te=False)).backend == "torch"


@pytest.mark.parametrize(
    ("backend", "near"),
    [("emulator", "emulate"), ("ref", "reference"), ("pytorch", "torch"), ("TE", None), ("", None)],
)
@pytest.mark.parametrize("asked", ["delayed", "bf16", "auto"])
def test_an_unknown_backend_is_refused_with_the_nearest_name(asked, backend, near):
    with pytest.raises(UserError) as caught:
        resolve(asked, H100, backend)
    message = str(caught.value)
    assert message.startswith(f"No backend '{backend}'.")
    assert (f"Did you mean '{near}'?" in message) == (near is not None)
    assert message.endswith("Known: auto, emulate, reference, te, torch.")


def test_the_backends_that_count_as_built_are_known_names():
    assert rules.BUILT >= TWO
    assert rules.BUILT <= FOUR


# Software that is missing or too old


@pytest.mark.parametrize("cuda", [(12, 8), (12, 6), (11, 8)], ids=str)
def test_block_on_hopper_needs_cuda_12_9(four, cuda):
    made = resolve("block", gpu(9, 0, cuda=cuda))
    assert (made.recipe.name, made.backend, made.native) == ("bf16", "reference", False)
    assert "block needs CUDA 12.9" in sentences(made)
    assert "bf16" in sentences(made)
    with pytest.raises(UserError, match=r"CUDA 12\.9"):
        resolve("block", gpu(9, 0, cuda=cuda), strict=True)


@pytest.mark.parametrize("cuda", [(12, 9), (13, 0), None], ids=str)
def test_block_on_hopper_is_native_from_cuda_12_9_on(four, cuda):
    assert resolve("block", gpu(9, 0, cuda=cuda), strict=True).native


@pytest.mark.parametrize("cuda", [(12, 7), (12, 4), (11, 8)], ids=str)
def test_mxfp8_on_blackwell_needs_cuda_12_8(four, cuda):
    made = resolve("mxfp8", gpu(10, 0, cuda=cuda))
    assert (made.recipe.name, made.backend, made.native) == ("mxfp8", "emulate", False)
    assert made.compute_dtype == "bf16"
    assert "mxfp8 needs CUDA 12.8" in sentences(made)
    assert "emulated" in sentences(made)
    with pytest.raises(UserError, match=r"CUDA 12\.8"):
        resolve("mxfp8", gpu(10, 0, cuda=cuda), strict=True)


@pytest.mark.parametrize("cuda", [(12, 8), (12, 9), (13, 0), None], ids=str)
def test_mxfp8_on_blackwell_is_native_from_cuda_12_8_on(four, cuda):
    assert resolve("mxfp8", gpu(10, 0, cuda=cuda), strict=True).native


@pytest.mark.parametrize("cuda", [(11, 8), (12, 4)], ids=str)
@pytest.mark.parametrize("asked", ["delayed", "current"])
def test_per_tensor_scaling_asks_nothing_of_the_cuda_version(four, asked, cuda):
    assert resolve(asked, gpu(9, 0, cuda=cuda), strict=True).native


@pytest.mark.parametrize(
    ("machine", "asked"),
    [
        (gpu(8, 9, te=False), "delayed"),
        (gpu(9, 0, te=False), "delayed"),
        (gpu(9, 0, te=False), "current"),
        (gpu(9, 0, te=False), "block"),
        (gpu(10, 0, te=False), "mxfp8"),
        (gpu(12, 0, te=False), "delayed"),
    ],
    ids=str,
)
def test_without_te_torch_serves_what_it_can(four, machine, asked):
    made = resolve(asked, machine, strict=True)
    assert (made.backend, made.native, made.reasons) == ("torch", True, ())


def test_without_te_block_on_blackwell_runs_in_bf16_and_names_te(four):
    made = resolve("block", gpu(10, 0, te=False))
    assert (made.recipe.name, made.backend, made.compute_dtype) == ("bf16", "reference", "bf16")
    assert "TE" in sentences(made)
    with pytest.raises(UserError, match="TE"):
        resolve("block", gpu(10, 0, te=False), strict=True)


# A user's own recipe


def test_a_recipe_given_as_a_value_resolves_like_its_name(four):
    assert resolve(load_recipe("delayed"), H100) == resolve("delayed", H100)


def test_a_users_own_fp8_recipe_keeps_its_settings_where_fp8_runs(four):
    mine = load_recipe("delayed").model_copy(update={"name": "mine", "history_length": 16})
    made = resolve(mine, H100)
    assert (made.asked, made.recipe, made.precision) == ("mine", mine, "mine")
    assert resolve(mine, H100, "emulate").precision == "mine-emulated"


def test_a_users_own_recipe_is_substituted_by_what_it_asks_for_not_by_its_name(four):
    mine = load_recipe("bf16").model_copy(update={"name": "delayed"})
    assert resolve(mine, H100).compute_dtype == "bf16"
    made = resolve(mine, T4)
    assert (made.asked, made.recipe.name, made.compute_dtype) == ("delayed", "fp16", "fp16")


def test_an_unknown_recipe_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="Did you mean 'mxfp8'"):
        resolve("mxpf8", H100)


# Layers

WIDTH, VOCABULARY = 768, 50257


def shapes(blocks: int = 6, vocabulary: int = VOCABULARY) -> dict[str, tuple[int, int]]:
    found = {}
    for i in range(blocks):
        found[f"blocks.{i}.attention.qkv"] = (WIDTH, 3 * WIDTH)
        found[f"blocks.{i}.attention.output"] = (WIDTH, WIDTH)
        found[f"blocks.{i}.mlp.up"] = (WIDTH, 4 * WIDTH)
        found[f"blocks.{i}.mlp.down"] = (4 * WIDTH, WIDTH)
    found["lm_head"] = (WIDTH, vocabulary)
    return found


def layered(
    machine: Hardware = H100, asked: str = "delayed", blocks: int = 6, strict: bool = False, **over
) -> Plan:
    """A plan with layers, the recipe changed by `over`."""
    recipe = load_recipe(asked).model_copy(update=over)
    return resolve(recipe, machine, strict=strict).for_layers(shapes(blocks))


def left_out(made: Plan) -> set[str]:
    return {layer.name for layer in made.layers if not layer.fp8}


@pytest.mark.parametrize("asked", FP8)
@pytest.mark.parametrize("machine", [CPU, H100, B200], ids=str)
def test_every_layer_but_the_head_is_in_fp8_by_default(four, asked, machine):
    made = layered(machine, asked)
    assert [layer.name for layer in made.layers] == list(shapes())
    assert left_out(made) == {"lm_head"}
    head = made.layer("lm_head")
    assert head.precision == made.compute_dtype
    assert "head = false" in head.reason
    first = made.layer("blocks.0.mlp.up")
    assert (first.precision, first.reason) == (asked, "")
    assert (first.in_features, first.out_features) == (WIDTH, 4 * WIDTH)


@pytest.mark.parametrize("asked", ["bf16", "fp16", "fp32"])
def test_no_layer_of_a_plain_recipe_is_in_fp8(asked):
    made = resolve(asked, H100, strict=True).for_layers(shapes())
    assert {layer.precision for layer in made.layers} == {asked}
    assert left_out(made) == set(shapes())


def test_a_recipe_that_fell_back_has_no_fp8_layers_and_checks_no_pattern():
    made = layered(A100, exclude=("*.qkv",))
    assert left_out(made) == set(shapes())
    assert {layer.precision for layer in made.layers} == {"bf16"}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("*.qkv",), {f"blocks.{i}.attention.qkv" for i in range(6)}),
        (("blocks.0.*",), {name for name in shapes() if name.startswith("blocks.0.")}),
        (("blocks.[01].mlp.up",), {"blocks.0.mlp.up", "blocks.1.mlp.up"}),
        (("blocks.3.mlp.down", "*.output"), None),
        (("lm_head",), set()),
        (("*",), set(shapes())),
        ((), set()),
    ],
    ids=str,
)
def test_layers_that_match_a_pattern_stay_out_and_name_it(four, patterns, expected):
    if expected is None:
        expected = {"blocks.3.mlp.down"} | {f"blocks.{i}.attention.output" for i in range(6)}
    made = layered(exclude=patterns, strict=True)
    assert left_out(made) == expected | {"lm_head"}
    for name in expected - {"lm_head"}:
        assert any(f"'{pattern}'" in made.layer(name).reason for pattern in patterns)
        assert made.layer(name).precision == "bf16"


@pytest.mark.parametrize("pattern", ["*.QKV", "qkv", "blocks.6.*", "transformer.*", "", "lm_heads"])
@pytest.mark.parametrize("machine", [CPU, H100], ids=str)
def test_a_pattern_that_matches_no_layer_is_refused_and_the_layers_are_named(
    four, machine, pattern
):
    with pytest.raises(UserError) as caught:
        layered(machine, exclude=("*.qkv", pattern))
    message = str(caught.value)
    assert f"'{pattern}'" in message
    assert "blocks.0.attention.qkv" in message
    assert "\n" not in message


def test_a_pattern_that_matches_no_layer_of_a_model_without_blocks_is_refused(four):
    recipe = load_recipe("delayed").model_copy(update={"exclude": ("decoder.*",)})
    with pytest.raises(UserError, match=r"'decoder\.\*'"):
        resolve(recipe, H100).for_layers({"encoder.0": (64, 64), "encoder.1": (64, 64)})


@pytest.mark.parametrize(
    ("first", "last", "out"),
    [
        (0, 0, set()),
        (1, 0, {0}),
        (0, 1, {5}),
        (2, 1, {0, 1, 5}),
        (3, 3, {0, 1, 2, 3, 4, 5}),
        (9, 0, {0, 1, 2, 3, 4, 5}),
        (0, 9, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_the_first_and_last_blocks_stay_out_as_asked(four, first, last, out):
    made = layered(exclude_first_blocks=first, exclude_last_blocks=last, strict=True)
    names = {name for name in shapes() if name.startswith("blocks.") and int(name[7]) in out}
    assert left_out(made) == names | {"lm_head"}
    for name in names:
        said = made.layer(name).reason
        assert said in (f"in the first {first} blocks", f"in the last {last} blocks")


def test_blocks_are_counted_beyond_nine(four):
    made = layered(blocks=12, exclude_first_blocks=2, exclude_last_blocks=2)
    out = {name.split(".")[1] for name in left_out(made) - {"lm_head"}}
    assert out == {"0", "1", "10", "11"}


@pytest.mark.parametrize("name", ["blocks", "blocks.attention", "blocks.first.mlp", "block.0.mlp"])
def test_a_module_path_that_only_resembles_a_block_is_no_error(four, name):
    made = resolve("delayed", H100).for_layers({name: (64, 64), "blocks.0.mlp.up": (64, 64)})
    assert made.layer(name).fp8


def test_the_head_is_in_fp8_when_the_recipe_says_so(four):
    recipe = load_recipe("delayed").model_copy(update={"head": True})
    made = resolve(recipe, H100, strict=True).for_layers(shapes(vocabulary=50304))
    assert left_out(made) == set()
    assert made.layer("lm_head").precision == "delayed"


@pytest.mark.parametrize(
    ("asked", "machine", "shape", "said"),
    [
        ("delayed", H100, (768, 50257), "50257 out features, not divisible by 16"),
        ("delayed", H100, (100, 64), "100 in features, not divisible by 16"),
        ("current", L4, (64, 8), "8 out features, not divisible by 16"),
        ("block", H100, (64, 24), "24 out features, not divisible by 16"),
        ("mxfp8", B200, (64, 48), "48 out features, not divisible by 32"),
        ("mxfp8", B200, (16, 64), "16 in features, not divisible by 32"),
    ],
)
def test_a_native_layer_of_a_shape_that_does_not_divide_stays_out(
    four, asked, machine, shape, said
):
    layers = {"blocks.0.mlp.up": (64, 64), "blocks.0.mlp.down": shape}
    made = resolve(asked, machine).for_layers(layers)
    assert left_out(made) == {"blocks.0.mlp.down"}
    assert made.layer("blocks.0.mlp.down").reason == said
    assert made.layer("blocks.0.mlp.down").precision == "bf16"
    with pytest.raises(UserError) as caught:
        resolve(asked, machine, strict=True).for_layers(layers)
    assert "blocks.0.mlp.down" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("asked", ["delayed", "current", "block"])
def test_48_features_divide_for_every_native_recipe_but_mxfp8(four, asked):
    made = resolve(asked, H100, strict=True).for_layers({"blocks.0.mlp.up": (48, 16)})
    assert left_out(made) == set()


@pytest.mark.parametrize("asked", FP8)
@pytest.mark.parametrize("machine", [CPU, H100], ids=str)
def test_an_emulated_layer_is_padded_so_any_shape_is_in_fp8(build, asked, machine):
    build(TWO)
    recipe = load_recipe(asked).model_copy(update={"head": True})
    odd = {"blocks.0.mlp.up": (7, 13), "lm_head": (7, 50257)}
    made = resolve(recipe, machine, "emulate", strict=True).for_layers(odd)
    assert left_out(made) == set()


def test_strict_forgives_a_requested_exclusion_whose_shape_does_not_divide(four):
    recipe = load_recipe("delayed").model_copy(update={"exclude": ("*.odd",)})
    made = resolve(recipe, H100, strict=True).for_layers(
        {"blocks.0.odd": (7, 7), "blocks.0.mlp.up": (64, 64), "lm_head": (7, 50257)}
    )
    assert left_out(made) == {"blocks.0.odd", "lm_head"}


def test_each_layer_that_is_not_in_fp8_adds_a_sentence_to_the_plans_reasons(four):
    """No layer leaves FP8 silently."""
    made = layered(exclude=("blocks.0.mlp.up",), exclude_last_blocks=1)
    assert len(left_out(made)) == 6
    for name in left_out(made):
        assert name in sentences(made)


def test_layers_decided_twice_are_the_same(four):
    made = layered(exclude=("*.qkv",), exclude_first_blocks=1)
    assert made.for_layers(shapes()) == made


# What is printed and stored


@pytest.mark.parametrize("machine", [CPU, H100], ids=str)
def test_the_summary_counts_fp8_layers_and_says_why_the_head_is_not(four, machine):
    made = layered(machine)
    line = f"FP8 layers 24/25 (lm_head: {made.compute_dtype}, the recipe says head = false)"
    assert line in made.summary()


def test_the_summary_names_a_vocabulary_that_does_not_divide(four):
    line = "FP8 layers 24/25 (lm_head: bf16, 50257 out features, not divisible by 16)"
    assert line in layered(head=True).summary()


def test_the_summary_has_no_parenthesis_when_all_layers_are_in_fp8(four):
    recipe = load_recipe("delayed").model_copy(update={"head": True})
    made = resolve(recipe, H100).for_layers(shapes(vocabulary=50304))
    assert "FP8 layers 25/25" in made.summary()


@pytest.mark.parametrize(
    ("asked", "machine", "first"),
    [
        ("delayed", H100, "plan: delayed, native, on cuda"),
        ("auto", H100, "plan: auto -> delayed, native, on cuda"),
        ("auto", CPU, "plan: auto -> fp32, plain torch, on cpu"),
        ("delayed", A100, "plan: delayed -> bf16, plain torch, on cuda"),
        ("mxfp8", A100, "plan: mxfp8, emulated by bf16 GEMMs on the exact operands, on cuda"),
        ("mxfp8", CPU, "plan: mxfp8, emulated by fp32 GEMMs on the exact operands, on cpu"),
    ],
)
def test_the_summary_starts_with_what_was_asked_and_what_runs(four, asked, machine, first):
    assert resolve(asked, machine).summary()[0] == first


@pytest.mark.parametrize(("built", "expected"), EVERY_CELL)
def test_the_summary_holds_every_reason_in_lines_of_their_own(build, built, expected):
    build(built)
    made = resolve(expected.asked, MACHINES[expected.machine]).for_layers(shapes())
    lines = made.summary()
    assert all("\n" not in line for line in lines)
    for reason in made.reasons:
        assert any(reason in line for line in lines)
    assert any(line.startswith("FP8 layers") for line in lines) == made.is_fp8


@pytest.mark.parametrize(("built", "expected"), EVERY_CELL)
def test_a_plan_as_json_survives_the_round_trip(build, built, expected):
    build(built)
    made = resolve(expected.asked, MACHINES[expected.machine]).for_layers(shapes())
    data = made.to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["asked"] == expected.asked
    assert data["recipe"]["name"] == expected.recipe
    assert (data["backend"], data["native"]) == (expected.backend, expected.native)
    assert data["compute_dtype"] == expected.compute_dtype
    assert data["loss_scaling"] == made.loss_scaling
    assert data["reasons"] == list(made.reasons)
    assert [layer["name"] for layer in data["layers"]] == list(shapes())
    assert data["layers"][0]["fp8"] == made.is_fp8


def test_the_recipe_stored_with_a_plan_makes_the_same_recipe_again(four):
    made = layered(exclude=("*.qkv",), history_length=16)
    again = type(made.recipe).model_validate_json(json.dumps(made.to_json()["recipe"]))
    assert again == made.recipe


# Values


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Plan)])
def test_a_plan_is_never_mutated(name):
    made = layered()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, None)


def test_the_parts_of_a_plan_are_frozen_too():
    made = layered()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.layers[0].fp8 = True
    with pytest.raises(ValidationError):
        made.recipe.margin = 3


def test_deciding_layers_leaves_the_plan_without_them_as_it_was():
    made = resolve("delayed", H100)
    made.for_layers(shapes())
    assert made.layers == ()


@pytest.mark.parametrize("asked", RECIPES)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_plan_is_made_without_touching_cuda_and_twice_the_same(four, monkeypatch, machine, asked):
    def touched(*args: object, **options: object) -> None:
        raise AssertionError("resolve asked the machine")

    for name in (
        "is_available",
        "device_count",
        "current_device",
        "get_device_properties",
        "get_device_capability",
        "get_device_name",
        "is_bf16_supported",
        "mem_get_info",
        "init",
        "_lazy_init",
    ):
        monkeypatch.setattr(torch.cuda, name, touched)
    plans = [resolve(asked, MACHINES[machine]).for_layers(shapes()) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].summary() == plans[1].summary()
    assert plans[0].to_json() == plans[1].to_json()
