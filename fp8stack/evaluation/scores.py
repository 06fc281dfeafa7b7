"""Losses window by window, recipe by recipe. B sequences, T tokens, V vocabulary, N windows."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.config import RunConfig
from fp8stack.errors import UserError
from fp8stack.evaluation.windows import Windows, require_text, windows_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware, Plan, probe
from fp8stack.training.dataloader import inputs_of
from fp8stack.training.evaluate import eval_mode
from fp8stack.training.setup.datasets import tokenizer_of_run
from fp8stack.training.trained import find_trained


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be evaluated, and on what."""

    runs: Sequence[str]  # see `find_trained`
    # To run each of them in; none for each run's own, the one it was last trained in, and fp32 for
    # a model of transformers.
    recipes: Sequence[str] = ()
    data: str | None = None  # see `windows_for`; so are `windows` and `context`
    windows: int | None = None
    context: int | None = None
    batch: int | None = None  # windows at a time; None for as many as a run's own evaluations take
    tokenizer: str | None = None  # name or path, of runs that do not have one
    device: str = "auto"
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("windows", "context", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} {value} evaluates nothing. Use 1 or more.")


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


def evaluate(runs: str | Path | Sequence[str | Path], *recipes: str, **more: Any) -> list[Score]:
    """The losses of trained models on the same windows.

    Args:
        runs: a run's folder, a checkpoint's, `hf:` and a folder that transformers saved or
            `hf:owner/name` (these need `data`), or several.
        recipes: to run each of them in; left out, each run's own.
        more: `data`, `windows`, `context`, `batch`, `tokenizer`, `device` and `backend`, as the
            options of `fp8stack eval`.

    Returns:
        A score for each run in each recipe, in that order, with `loss` in nats per token,
        `perplexity`, `bits_per_byte`, and `difference` from the run's first recipe with its
        `standard_error`. What goes on is told on stderr.

    Raises:
        UserError: no such run, recipe, data or tokenizer.
        NoUsableCheckpoint: a run's checkpoints are damaged.
    """
    several = [runs] if isinstance(runs, str | Path) else runs
    request = Request(runs=[str(run) for run in several], recipes=recipes, **more)
    hardware = probe(request.device)
    return [score for run in request.runs for score in _scores(run, request, hardware)]


def _scores(run: str, request: Request, hardware: Hardware) -> list[Score]:
    trained = find_trained(run)
    for note in trained.notes:
        print(note, file=sys.stderr)
    require_text(run, trained.config, request.data)
    config = trained.config or RunConfig()
    scores: list[Score] = []
    windows: Windows | None = None
    recipes = request.recipes or [trained.recipe]
    for recipe in recipes:  # all are refused before the first one is evaluated
        trained.plan(recipe, hardware, request.backend)
    for recipe in recipes:
        model = trained.model(recipe, hardware, request.backend)
        if windows is None:
            tokenizer = tokenizer_of_run(run, request.tokenizer or trained.tokenizer)
            chosen = (request.data, request.windows, request.context)
            windows = windows_for(run, config, model.config, tokenizer, *chosen)
        print(
            f"{trained.path} in {recipe}: {len(windows.tokens)} windows",
            file=sys.stderr,
            flush=True,
        )
        began = time.perf_counter()
        nats_NT = nats_of(model, windows.tokens, request.batch or config.batch // config.accumulate)
        scores.append(
            Score(
                run=run,
                checkpoint=trained.path,
                recipe=recipe,
                plan=model.backend.plan,
                data=windows.name,
                losses_N=nats_NT.mean(dim=1),
                bits_per_byte=bits_per_byte(nats_NT, windows.text_bytes),
                fp8_gemms=model.backend.fp8_gemms(),
                tokens=nats_NT.numel(),
                seconds=time.perf_counter() - began,
                baseline=scores[0] if scores else None,
            )
        )
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
