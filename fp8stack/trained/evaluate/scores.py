"""Losses window by window, recipe by recipe. B sequences, T tokens, V vocabulary, N windows."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.common.tables import counted
from fp8stack.common.terminal import warn
from fp8stack.model.gpt import GPT
from fp8stack.precision import Plan
from fp8stack.trained.evaluate.evaluated_run import evaluated_runs
from fp8stack.training.dataloader import inputs_of
from fp8stack.training.evaluate import eval_mode


@dataclass(frozen=True, kw_only=True, eq=False)
class Score:
    """The losses of a model in one recipe."""

    run: str  # as the user named it
    checkpoint: Path  # the folder that was read, or the name of a model of transformers
    recipe: str  # as the user named it
    plan: Plan  # the plan that ran
    data: str  # the name of the data
    losses_N: Tensor  # nats per token of each window, float64, on the CPU
    bits_per_byte: float | None  # None if the text behind the labels is unknown
    fp8_gemms: int  # the number of GEMMs on FP8 operands that ran
    tokens: int  # the number of labels
    seconds: float  # the time that the evaluation took
    baseline: Score | None  # the score in the run's first recipe; None if this is it

    @property
    def loss(self) -> float:
        """The mean loss, in nats per token."""
        return self.losses_N.mean().item()

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.inf if self.loss >= 700 else math.exp(self.loss)

    @property
    def difference(self) -> float | None:
        """The loss minus the baseline's loss, on the same windows."""
        differences_N = self._differences_N
        return None if differences_N is None else differences_N.mean().item()

    @property
    def standard_error(self) -> float | None:
        """The `standard_error` of `difference`; None for a single window."""
        differences_N = self._differences_N
        return None if differences_N is None else standard_error(differences_N)

    @property
    def _differences_N(self) -> Tensor | None:
        return None if self.baseline is None else self.losses_N - self.baseline.losses_N


def evaluate(
    runs: str | Path | Sequence[str | Path],
    *recipes: str,
    data: str | None = None,
    windows: int | None = None,
    context: int | None = None,
    batch: int | None = None,
    tokenizer: str | None = None,
    device: str = "auto",
    backend: str = "auto",
) -> list[Score]:
    """Evaluate trained models on the same windows. Progress is printed to stderr.

    Args:
        runs: one or several models: a run's folder, a checkpoint's folder, `hf:` and a folder that
            transformers saved, or `hf:owner/name` (the last two need `data`).
        recipes: recipes to run each model in. By default, the recipe that a run was last trained
            in, and fp32 for a model of transformers. A folder of transformers, `hf:...` or a path,
            runs in the place of the model, in its own weights and scheme: see `ServedFolder`.
        data, windows, context: see `windows_for`.
        batch: windows per forward pass; None for as many as the run's own evaluations take.
        tokenizer: the name or path of the tokenizer, for runs that do not have one.
        device, backend: see the options of `fp8stack eval`.

    Returns:
        A score for every run in every recipe, in that order, with `loss` in nats per token,
        `perplexity`, `bits_per_byte`, and `difference` from the run's first recipe with its
        `standard_error`.

    Raises:
        UserError: no such run, recipe, data or tokenizer.
        NoUsableCheckpoint: a run's checkpoints are damaged.
    """
    scores: list[Score] = []
    for evaluated in evaluated_runs(
        runs,
        recipes,
        data=data,
        windows=windows,
        context=context,
        batch=batch,
        tokenizer=tokenizer,
        device=device,
        backend=backend,
    ):
        baseline: Score | None = None
        run_windows, path = evaluated.windows, evaluated.trained.path
        for recipe in evaluated.recipes:
            model = evaluated.model(recipe)
            warn(f"{path} in {recipe}: {counted(len(run_windows.tokens), 'window')}")
            began = time.perf_counter()
            nats_NT = nats_of(model, run_windows.tokens, evaluated.batch)
            score = Score(
                run=evaluated.run,
                checkpoint=path,
                recipe=recipe,
                plan=model.backend.plan,
                data=run_windows.name,
                losses_N=nats_NT.mean(dim=1),
                bits_per_byte=bits_per_byte(nats_NT, run_windows.text_bytes),
                fp8_gemms=model.backend.fp8_gemms(),
                tokens=nats_NT.numel(),
                seconds=time.perf_counter() - began,
                baseline=baseline,
            )
            baseline = baseline or score
            scores.append(score)
    return scores


def nats_of(model: GPT, windows: Tensor, batch: int) -> Tensor:
    """The loss of each label, in nats: float64 [N, T], on the CPU, for windows int64 [N, T + 1], or
    with documents [N, 2, T + 1]. The logits of `batch` windows, float32 [batch, T, V], are in
    memory at once."""
    device = model.embedding.weight.device
    nats = []
    with eval_mode(model):
        for batch_windows in torch.split(windows, batch):
            inputs_BT, targets_BT, *documents = inputs_of(batch_windows.to(device))
            logits_BTV = model(inputs_BT, None, *documents)
            nats += [
                F.cross_entropy(logits_TV, targets_T, reduction="none").double().cpu()
                for logits_TV, targets_T in zip(logits_BTV, targets_BT, strict=True)
            ]
    return torch.stack(nats)


def standard_error(differences_N: Tensor) -> float | None:
    """The standard error of the mean of the windows' differences, [N]: their standard deviation
    over the root of their number; None for a single window."""
    if len(differences_N) < 2:
        return None
    return (differences_N.std(correction=1) / math.sqrt(len(differences_N))).item()


def bits_per_byte(nats_NT: Tensor, text_bytes: Tensor | None) -> float | None:
    """Bits of loss per byte of text, from nats per token, float64 [N, T]. Bits per byte can be
    compared between tokenizers, nats per token cannot. Tokens that stand for no text, such as the
    end of a document, count neither as loss nor as bytes, if the bytes of each token are known: see
    `Windows.text_bytes`."""
    if text_bytes is None or not int(text_bytes.sum()):
        return None
    nats = (nats_NT * (text_bytes > 0)).sum()
    return (nats / text_bytes.sum() / math.log(2)).item()
