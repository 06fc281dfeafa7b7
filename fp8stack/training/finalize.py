"""The end of a run: the loss plot, a text sample, and where the files are."""

import math
from collections.abc import Callable

from fp8stack.common.io import write_atomically
from fp8stack.common.tables import counted
from fp8stack.common.terminal import LAYOUT
from fp8stack.model.gpt import GPT
from fp8stack.model.sampling import Sampling, generate
from fp8stack.training.checkpoint import reader as checkpoints
from fp8stack.training.metrics.console import Display
from fp8stack.training.metrics.loss_plot import loss_plot
from fp8stack.training.metrics.read import Metrics, read_metrics
from fp8stack.training.run import Run


def finish(run: Run, display: Display, model: GPT, evaluate: Callable[[], float | None]) -> None:
    """Write the loss plot and a sample of `model`, and print where everything is. All ranks call
    it; `evaluate` computes the validation loss if no step of the run has one."""
    folder, is_main = run.folder, run.ranks.is_main
    with run.ranks.together():
        metrics = read_metrics(folder.path) if is_main else Metrics()
        if is_main:
            plot = loss_plot(metrics, f"{run.config.model}, {run.plan.precision}")
            write_atomically(folder.plot, plot)
    text = _sample(run, model)  # on every rank, since the model may be sharded
    _, evaluated = metrics.column("val_loss")
    final = evaluated[-1] if evaluated else math.nan
    if run.ranks.any(is_main and not evaluated):
        final = evaluate() or math.nan
    with run.ranks.together():
        if text and is_main:
            write_atomically(folder.sample, text.encode())
            display.note("sample:", text, keep=LAYOUT)
    if run.loss_scaler is not None:
        display.note(str(run.loss_scaler.statistics()))
    display.note(
        f"done: validation loss {final:.4f} nats per token after {counted(run.step, 'step')}.",
        f"checkpoint: {checkpoints.path_of(folder.checkpoints, run.step)}",
        f"plot: {folder.plot}",
        *folder.next_commands(),
    )


def _sample(run: Run, model: GPT) -> str:
    """A text sample of a model; empty if `sample_tokens` is 0 or the tokenizer is unknown."""
    config, tokenizer = run.config, run.data.tokenizer
    if not config.sample_tokens or tokenizer is None:
        return ""
    prompt = config.sample_prompt or ("def " if config.data is None else "\n")
    encoded = tokenizer.begin(prompt)
    if not encoded:  # the tokenizer drops white space and has no end-of-text token
        return ""
    sampling = Sampling(temperature=config.temperature)
    tokens = generate(model, encoded, config.sample_tokens, sampling, seed=config.seed)
    return prompt + tokenizer.decode(list(tokens))
