"""The keys of a run for type checkers, which then find a misspelled key in a call of `pretrain`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from fp8stack.planning.run_config import OptimizerName


class GuardKeys(TypedDict, total=False):
    """Keys of `GuardConfig`, which explains them."""

    enabled: bool
    window: int
    warmup: int
    deviations: float
    loss_factor: float
    gradient_factor: float
    amax_factor: float
    patience: int
    calm_steps: int
    layer_steps: int
    quality: float
    overflows: int


class RunKeys(TypedDict, total=False):
    """Keys of `RunConfig`, which explains them."""

    model: str | Path
    recipe: str | Path
    backend: Literal["auto", "te", "torch", "emulate", "reference"]
    strict: bool
    device: Literal["auto", "cpu", "cuda", "xpu"]
    data: str | Path | None
    data_order: Literal["random", "epochs"]
    document_mask: bool
    tokenizer: str | Path | None
    out: str | Path | None
    seed: int
    steps: int
    batch: int
    context: int | None
    accumulate: int
    lr: float
    schedule: Literal["cosine", "wsd", "constant"]
    warmup_steps: int
    decay_fraction: float
    min_lr: float
    weight_decay: float
    beta1: float
    beta2: float
    adam_eps: float
    clip: float
    clip_mode: Literal["norm", "value", "adaptive"]
    clip_percentile: float
    clip_window: int
    optimizer: OptimizerName
    momentum: float
    loss_scale: float | None
    first_loss_scale: float
    loss_scale_interval: int
    loss_scale_growth: float
    loss_scale_backoff: float
    min_loss_scale: float
    max_loss_scale: float
    log_every: int
    eval_every: int
    eval_windows: int
    final_eval_windows: int | None
    save_every: int
    keep_checkpoints: int
    keep_every: int
    checkpoint_async: bool
    sample_tokens: int
    sample_prompt: str | None
    temperature: float
    workers: int
    worker_timeout: float
    threads: int | None
    deterministic: bool | None
    parallel: Literal["ddp", "fsdp"]
    rank_timeout: float
    activation_checkpointing: Literal["none", "selective", "block"]
    grad_compression: Literal["none", "bf16"]
    compile: bool | None
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"]
    check_memory: bool
    profile: bool
    profile_step: int | None
    profile_steps: int
    profile_shapes: bool
    profile_memory: bool
    tensorboard: bool
    wandb: bool
    trackio: bool
    telemetry_every: int
    what_if: str | Sequence[str]
    init_from: str | Path | None
    phases: str | Sequence[Mapping[str, Any]]
    guard: GuardKeys
    model_overrides: Mapping[str, Any]
    recipe_overrides: Mapping[str, Any]
