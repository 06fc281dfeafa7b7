"""The keys of a run: the type, limits, default and flag of each, and when it may change.

`RunConfig` checks them and adds the keys that are tables. They stand in a class of their own since
the command reads them for each `--help`, and importing pydantic takes longer than that may.
"""

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:  # so that type checkers know the keys of `RunConfig(...)`
    from pydantic import BaseModel as _Fields
else:
    _Fields = object


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a number, as pydantic's `Field` has them."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        limits = {name: limit for name, limit in vars(self).items() if limit is not None}
        schema: dict[str, Any] = handler(source) | limits
        return schema


class Mark(Enum):
    """Properties of a key: when it may change, and what it is for.

    A resumed run may change keys marked `RESUME`: they do not affect its numbers, or let it go on
    to another step or on another machine. The files of the model, the recipe and the data may have
    moved; their contents are compared. A branch, which is a new run that begins with another run's
    checkpoint, may also change keys marked `BRANCH`. The training preset of a model may set keys
    marked `PRESET`. Keys marked `TRACKER` start an experiment tracker.
    """

    RESUME = 1
    BRANCH = 2
    PRESET = 3
    TRACKER = 4


RESUME, BRANCH, PRESET, TRACKER = Mark


@dataclass(frozen=True)
class Flag:
    """The flag of a key: its group in `--help` and its text there, which the choices of the key
    and its default are added to. `default` describes a default that is not a plain value,
    `complete` is the kind of presets that a shell completes, `names` are given if `--key` is not
    the only one."""

    group: str
    help: str
    default: str = ""
    complete: Literal["models", "recipes"] | None = None
    names: tuple[str, ...] = ()


_precision, _data = partial(Flag, "Model and precision"), partial(Flag, "Data")
_training, _machine = partial(Flag, "Training"), partial(Flag, "Machine")
_files, _logs = partial(Flag, "Files"), partial(Flag, "Logs")

OptimizerName = Literal["adamw", "sgd", "muon", "adamw8bit", "adamwfp8"]
Positive = Annotated[int, Limits(ge=1)]
NotNegative = Annotated[int, Limits(ge=0)]
PositiveFloat = Annotated[float, Limits(gt=0)]
Fraction = Annotated[float, Limits(ge=0, le=1)]
Momentum = Annotated[float, Limits(ge=0, lt=1)]
LossScaleBound = Annotated[float, Limits(ge=2.0**-126, le=2.0**126)]  # its inverse is normal, too


class RunKeys(_Fields):
    """The keys of a run that are no tables. A key with a `Flag` can be given to the command by it,
    others by `--set`."""

    model: Annotated[str, _precision("Model preset or TOML file.", complete="models"), RESUME] = (
        "gpt-nano"
    )
    recipe: Annotated[
        str, _precision("Precision recipe or TOML file.", complete="recipes"), RESUME
    ] = "auto"
    backend: Annotated[
        Literal["auto", "te", "torch", "emulate", "reference"], _precision("Backend:"), RESUME
    ] = "auto"
    strict: Annotated[
        bool, _precision("Fail instead of substituting a recipe or backend."), RESUME
    ] = False
    device: Annotated[Literal["auto", "cpu", "cuda", "xpu"], _machine("Device:"), RESUME] = "auto"
    data: Annotated[
        str | None, _data("Text, tokens, a folder, or a mixture.", "Python's library"), RESUME
    ] = None
    data_order: Annotated[Literal["random", "epochs"], _data("Order of windows:")] = "random"
    """Windows at random positions, or all windows once per epoch, in a new order each epoch."""
    document_mask: Annotated[bool, _data("Keep attention within documents.")] = False
    """Attention does not cross documents. The data must record where documents end."""
    tokenizer: Annotated[
        str | None, _data("Of text and .bin: bytes, gpt2 or a tokenizer.json."), RESUME
    ] = None
    """Tokenizer to assume if the data record none: bytes, gpt2, or the path of a tokenizer.json."""
    out: Annotated[str | None, _files("Run folder.", "runs/MODEL-RECIPE"), RESUME] = None
    seed: Annotated[
        int, Limits(ge=0, lt=2**63), _training("Seed for weights, data order and samples.")
    ] = 0

    steps: Annotated[int, Limits(ge=1, le=2**31), _training("Optimizer steps."), RESUME] = 1200
    batch: Annotated[
        int, Limits(ge=1, le=2**24), _training("Sequences per step, over all ranks."), PRESET
    ] = 8
    """Sequences per step, over all ranks and micro-batches."""
    context: Annotated[Positive | None, _training("Tokens per sequence.", "the model's")] = None
    accumulate: Annotated[Positive, _training("Micro-batches per step."), RESUME, PRESET] = 1
    lr: Annotated[
        PositiveFloat,
        _training("Peak learning rate.", names=("--lr", "--learning-rate")),
        BRANCH,
        PRESET,
    ] = 3e-3
    schedule: Annotated[
        Literal["cosine", "wsd", "constant"], _training("Schedule:"), BRANCH, PRESET
    ] = "cosine"
    warmup_steps: Annotated[NotNegative, _training("Steps of linear warm-up."), BRANCH, PRESET] = 50
    decay_fraction: Annotated[Fraction, BRANCH] = 0.2
    """wsd: the share of the steps in which the learning rate decays."""
    min_lr: Annotated[Fraction, BRANCH, PRESET] = 0.1
    """The last learning rate, as a share of `lr`."""
    weight_decay: Annotated[float, Limits(ge=0), _training("Weight decay of matrices."), PRESET] = (
        0.1
    )
    beta1: Annotated[Momentum, PRESET] = 0.9
    beta2: Annotated[Momentum, PRESET] = 0.95
    adam_eps: Annotated[PositiveFloat, PRESET] = 1e-8
    clip: Annotated[float, Limits(ge=0), PRESET] = 1.0
    """The largest global gradient norm, or with clip_mode "value" the largest entry; 0: none."""
    clip_mode: Literal["norm", "value", "adaptive"] = "norm"
    """adaptive: limit the norm to `clip_percentile` of the previous norms, and to `clip`."""
    clip_percentile: Annotated[float, Limits(gt=0, lt=100)] = 95.0
    clip_window: Annotated[int, Limits(ge=10, le=4096)] = 100
    """adaptive: the number of previous good steps whose norms count."""
    optimizer: Annotated[OptimizerName, _training("Optimizer:")] = "adamw"
    """muon uses AdamW except for the blocks' matrices. adamw8bit and adamwfp8 need torchao."""
    momentum: Momentum = 0.9
    """sgd: the momentum factor; 0 is plain gradient descent."""
    loss_scale: PositiveFloat | None = None
    """fp16: a static loss scale; dynamic if left out."""
    first_loss_scale: PositiveFloat = 65536.0
    """fp16: the initial dynamic loss scale."""
    loss_scale_interval: Annotated[int, Limits(ge=1, lt=2**31)] = 2000
    """fp16: steps in a row without an overflow after which a dynamic loss scale grows."""
    loss_scale_growth: Annotated[float, Limits(gt=1, le=65536)] = 2.0
    """fp16: the factor by which a dynamic loss scale grows."""
    loss_scale_backoff: Annotated[float, Limits(gt=0, lt=1)] = 0.5
    """fp16: the factor that an overflow multiplies it by."""
    min_loss_scale: LossScaleBound = 1.0
    max_loss_scale: LossScaleBound = 262144.0
    """fp16: the bounds of the loss scale."""

    log_every: Annotated[
        Positive | None, _logs("Steps between log lines.", "5 % of the run"), RESUME
    ] = None
    """Steps between log lines, and between rows of metrics.jsonl. By default metrics.jsonl has
    every step, and a line is printed every 5 % of the run."""
    eval_every: Annotated[Positive, _files("Steps between evaluations."), RESUME] = 300
    eval_windows: Annotated[Positive, RESUME] = 256
    """Held-out windows per evaluation."""
    final_eval_windows: Annotated[Positive | None, RESUME] = None
    """Held-out windows of the evaluation after the last step; `eval_windows` if left out."""
    save_every: Annotated[Positive, _files("Steps between checkpoints."), RESUME] = 400
    keep_checkpoints: Annotated[int, Limits(ge=2), RESUME] = 2
    """The newest valid checkpoints to keep; older ones are removed."""
    keep_every: Annotated[NotNegative, RESUME] = 0
    """Also keep every checkpoint whose step is a multiple of this; 0: none."""
    checkpoint_async: Annotated[bool, _files("Write checkpoints in the background."), RESUME] = (
        False
    )
    """Write checkpoints in the background: a step waits only for a copy in host memory."""
    sample_tokens: Annotated[NotNegative, RESUME] = 256
    sample_prompt: Annotated[str | None, RESUME] = None
    temperature: Annotated[PositiveFloat, RESUME] = 0.8
    workers: Annotated[int, Limits(ge=0, le=64), RESUME] = 0
    """Processes that read data ahead; batches are the same for any number."""
    worker_timeout: Annotated[float, Limits(ge=1), RESUME] = 60.0
    """Seconds without a batch after which a data worker counts as lost."""
    threads: Annotated[
        Positive | None, _machine("CPU threads for torch.", "torch's choice"), RESUME
    ] = None
    """CPU threads for torch, at most the number of cores; by default torch's choice."""
    deterministic: Annotated[bool | None, RESUME] = None
    """GPUs and compiled code: reproducible operations, which are slower. Default on CPUs."""
    parallel: Annotated[
        Literal["ddp", "fsdp"], _machine("Several ranks, sharded by fsdp:"), RESUME
    ] = "ddp"
    """Several ranks: DDP, with a complete model on each rank, or FSDP2, which shards the model."""
    rank_timeout: Annotated[float, Limits(ge=1), RESUME] = 600.0
    """Seconds without an answer after which a rank counts as lost."""
    activation_checkpointing: Annotated[
        Literal["none", "selective", "block"], _machine("Recompute activations:"), RESUME
    ] = "none"
    """The backward pass recomputes all but GEMMs and attention (selective), or blocks (block)."""
    grad_compression: Annotated[Literal["none", "bf16"], _machine("Gradients with ddp:")] = "none"
    """ddp: the format that gradients are rounded to before the all-reduce."""
    compile: Annotated[bool | None, _machine("Use torch.compile.", "on a GPU"), RESUME] = None
    """torch.compile: the first step takes about a minute, others less time. Default on GPUs."""
    compile_mode: Annotated[Literal["default", "max-autotune-no-cudagraphs"], RESUME] = "default"
    """compile: the mode of torch.compile; only modes without CUDA graphs."""
    cuda_graphs: Annotated[bool, RESUME] = True
    """compile, one GPU of NVIDIA: record forward and backward passes as CUDA graphs and replay
    them, where possible."""
    check_memory: Annotated[bool, RESUME] = True
    """Refuse a run whose estimated memory exceeds the free memory."""
    profile: Annotated[bool, _logs("Profile one step after warm-up."), RESUME] = False
    """Profile some steps after warm-up into the run folder."""
    profile_step: Annotated[Positive | None, RESUME] = None
    """profile: the first profiled step; the fifth of this start if left out."""
    profile_steps: Annotated[int, Limits(ge=1, le=100), RESUME] = 1
    """profile: the number of consecutive steps."""
    profile_shapes: Annotated[bool, RESUME] = False
    """profile: record the shapes of operands, and list operators by shape."""
    profile_memory: Annotated[bool, RESUME] = False
    """profile: list the memory that operators allocate on a GPU; on a CPU it is always listed."""
    tensorboard: Annotated[bool, _logs("Also write TensorBoard events."), RESUME, TRACKER] = False
    wandb: Annotated[bool, _logs("Also log to Weights & Biases."), RESUME, TRACKER] = False
    trackio: Annotated[bool, _logs("Also log to trackio, on this machine."), RESUME, TRACKER] = (
        False
    )
    telemetry_every: Annotated[
        NotNegative, _logs("Steps between FP8 samples; 0: none."), RESUME
    ] = 50
    """Steps between telemetry samples of the quantization of each operand; 0: no samples."""
    what_if: Annotated[
        tuple[str, ...],
        _logs("More recipes for telemetry: mxfp8,block.", complete="recipes"),
        RESUME,
    ] = ()
    """Recipes that telemetry tries on the same operands, without changing the run."""
    init_from: Annotated[
        str | None,
        _precision(
            "Run, checkpoint, hf:FOLDER or hf:owner/name to begin from.",
            names=("--init-from", "--init"),
        ),
    ] = None
    """A run or checkpoint whose weights the run begins with."""


FLAGS = {
    key: mark
    for key, annotation in RunKeys.__annotations__.items()
    for mark in getattr(annotation, "__metadata__", ())
    if isinstance(mark, Flag)
}
"""The flags of the command, by key."""
