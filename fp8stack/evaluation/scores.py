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

from fp8stack.config import RunConfig
from fp8stack.errors import UserError
from fp8stack.evaluation.windows import Windows, require_text, windows_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Plan, probe
from fp8stack.tables import counted
from fp8stack.terminal import warn
from fp8stack.training.dataloader import inputs_of
from fp8stack.training.evaluate import eval_mode
from fp8stack.training.load import find_source, tokenizer_of_run


@dataclass(frozen=True, kw_only=True, eq=False)
class Score:
    """What a run's model made of some windows in one recipe."""

    run: str  # and recipe, as they were asked for
    checkpoint: Path  # what was read: a folder, or a model of transformers as a run file names it
    recipe: str
    plan: Plan  # what ran
    data: str  # its name
    losses_N: Tensor  # nats per token of each window, float64, on the CPU
    bits_per_byte: float | None  # of the text that the labels stand for; None if nobody knows it
    fp8_gemms: int  # how many GEMMs on FP8 operands really ran
    tokens: int  # how many labels there were
    seconds: float  # that it took
    baseline: Score | None  # the run's first recipe; None for that itself

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.losses_N.mean().item()

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def difference(self) -> float | None:
        """The loss less the baseline's, on the same windows."""
        differences_N = self._differences_N
        return None if differences_N is None else differences_N.mean().item()

    @property
    def standard_error(self) -> float | None:
        """Of the difference: the standard deviation of the windows' differences, over the root of
        their number; None for a single window."""
        differences_N = self._differences_N
        if differences_N is None or len(differences_N) < 2:
            return None
        return (differences_N.std(correction=1) / math.sqrt(len(differences_N))).item()

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
    """The losses of trained models on the same windows. What goes on is told on stderr.

    Args:
        runs: a run's folder, a checkpoint's, `hf:` and a folder that transformers saved or
            `hf:owner/name` (these need `data`), or several.
        recipes: to run each of them in; left out, each run's own, the one it was last trained in,
            and fp32 for a model of transformers.
        data, windows, context: see `windows_for`.
        batch: windows at a time; None for as many as a run's own evaluations take.
        tokenizer: name or path, of runs that do not have one.
        device, backend: as the options of `fp8stack eval`.

    Returns:
        A score for each run in each recipe, in that order, with `loss` in nats per token,
        `perplexity`, `bits_per_byte`, and `difference` from the run's first recipe with its
        `standard_error`.

    Raises:
        UserError: no such run, recipe, data or tokenizer.
        NoUsableCheckpoint: a run's checkpoints are damaged.
    """
    for name, value in (("windows", windows), ("context", context), ("batch", batch)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value} evaluates nothing. Use 1 or more.")
    hardware = probe(device)
    scores: list[Score] = []
    for run in [str(runs)] if isinstance(runs, str | Path) else map(str, runs):
        trained = find_source(run)
        for note in trained.notes:
            warn(note)
        require_text(run, trained.config, data)
        config = trained.config or RunConfig()
        chosen = recipes or (trained.recipe,)
        for recipe in chosen:  # all are refused before the first one is evaluated
            trained.plan(recipe, hardware, backend)
        baseline: Score | None = None
        given: Windows | None = None
        for recipe in chosen:
            model = trained.model(recipe, hardware, backend)
            if given is None:
                tokenizer_name = tokenizer or trained.own_tokenizer
                known = tokenizer_of_run(run, tokenizer_name, trained.recorded_tokenizer)
                given = windows_for(run, config, model.config, known, data, windows, context)
            count = len(given.tokens)
            warn(f"{trained.path} in {recipe}: {counted(count, 'window')}")
            began = time.perf_counter()
            nats_NT = nats_of(model, given.tokens, batch or config.batch // config.accumulate)
            score = Score(
                run=run,
                checkpoint=trained.path,
                recipe=recipe,
                plan=model.backend.plan,
                data=given.name,
                losses_N=nats_NT.mean(dim=1),
                bits_per_byte=bits_per_byte(nats_NT, given.text_bytes),
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
    with documents [N, 2, T + 1]. The logits of `batch` of them, [batch, T, V] in float32, are in
    memory at once."""
    device = model.embedding.weight.device
    found = []
    with eval_mode(model):
        for part in torch.split(windows, batch):
            inputs_BT, targets_BT, *documents = inputs_of(part.to(device))
            logits_BTV = model(inputs_BT, None, *documents)
            found += [
                F.cross_entropy(logits_TV, targets_T, reduction="none").double().cpu()
                for logits_TV, targets_T in zip(logits_BTV, targets_BT, strict=True)
            ]
    return torch.stack(found)


def bits_per_byte(nats_NT: Tensor, text_bytes: Tensor | None) -> float | None:
    """Bits of loss per byte of text: comparable between tokenizers, as nats per token, float64 [N,
    T], are not. Tokens that stand for no text, such as the end of a document, count neither above
    nor below, where it is known of each token: see `Windows.text_bytes`."""
    if text_bytes is None or not int(text_bytes.sum()):
        return None
    nats = (nats_NT * (text_bytes > 0)).sum()
    return (nats / text_bytes.sum() / math.log(2)).item()
