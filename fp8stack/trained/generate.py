"""`fp8stack generate`: writes text with a trained model, token by token."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fp8stack.common.errors import Interrupted, UserError, quoted
from fp8stack.common.tables import counted
from fp8stack.common.terminal import warn, write_text
from fp8stack.data.tokenizer import Tokenizer
from fp8stack.model.gpt import GPT
from fp8stack.model.sampling import Sampling
from fp8stack.model.sampling import generate as sampled
from fp8stack.precision import Hardware, probe
from fp8stack.training.load import Trained, find_source, name_of_run, tokenizer_of_run

DECODED_AGAIN = 64  # last prompt tokens, which may affect the first character after the prompt


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The options of a generation."""

    run: str  # see `find_source`
    prompt: str  # the beginning of the text
    tokens: int  # maximum number of new tokens
    seed: int
    sampling: Sampling
    recipe: str | None = None  # None: bf16 if the machine multiplies it, else fp32
    tokenizer: str | None = None  # a name or path; None for the run's
    device: str = "auto"
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"--tokens {self.tokens} writes nothing. Use 1 or more.")
        if not 0 <= self.seed < 2**64:
            raise UserError(f"--seed {self.seed} is not a seed. Use 0 to 2**64 - 1.")
        try:
            self.prompt.encode()
        except UnicodeEncodeError:
            raise UserError("The prompt is not valid UTF-8. Write it in UTF-8.") from None


def write(request: GenerationOptions) -> None:
    """Print the prompt and the model's text while it is generated. Prints the checkpoint, plan and
    speed to stderr.

    Raises:
        UserError: no such run, tokenizer or recipe, or a prompt that the model cannot read.
        NoUsableCheckpoint: the run's checkpoints are damaged.
        NumericFailure: the model gives logits that are not finite.
        Interrupted: the user pressed Ctrl-C.
    """
    text = _Text(request, warn)
    with closing(_Speed(min(len(text.prompt), text.model.config.context), text.model)) as speed:
        _print(request.prompt, text.pieces(speed.timed(text.tokens())))


def generate(
    run_or_checkpoint: str | Path,
    prompt: str = "",
    *,
    tokens: int = 256,
    seed: int = 0,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    recipe: str | None = None,
    tokenizer: str | None = None,
    device: str = "auto",
) -> str:
    """Generate text with a trained model. Returns the prompt and its continuation, the text that
    `fp8stack generate` prints.

    Args:
        run_or_checkpoint: a run's folder, `.../checkpoints/step-000200`, `hf:FOLDER` for a folder
            that transformers saved, or `hf:owner/name`.
        prompt: the beginning of the text; empty: the start of a document.
        tokens: the maximum number of new tokens; fewer if the model ends the document.
        seed: seed of the sampling.
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_k: sample from the k likeliest tokens.
        top_p: sample from the likeliest tokens of this total probability.
        recipe: the recipe that the model runs in; by default bf16 if the machine multiplies it,
            else fp32.
        tokenizer: a name or path, for a run that does not record one.
        device: "auto", "cpu", "cuda" or "xpu".

    Raises:
        UserError: no such run, tokenizer or recipe, or a prompt that the model cannot read.
        NoUsableCheckpoint: the run's checkpoints are damaged.
        NumericFailure: the model gives logits that are not finite.
    """
    request = GenerationOptions(
        run=name_of_run(run_or_checkpoint),
        prompt=prompt,
        tokens=tokens,
        seed=seed,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        recipe=recipe,
        tokenizer=tokenizer,
        device=device,
    )
    text = _Text(request, lambda *lines: None)
    return prompt + "".join(text.pieces(text.tokens()))


class _Text:
    """A text to generate. `say` is called with lines on the checkpoint and the plan."""

    def __init__(self, request: GenerationOptions, say: Callable[..., None]) -> None:
        hardware = probe(request.device)
        trained = find_source(request.run)
        recipe, reason = (request.recipe, "") if request.recipe else default_recipe(hardware)
        self.request, self._say = request, say
        self.model = trained.model(recipe, hardware, request.backend)
        vocabulary = self.model.config.vocabulary
        name = request.tokenizer or trained.own_tokenizer
        self.tokenizer = tokenizer_for(request.run, name, trained)
        self.prompt = prompt_tokens(request.prompt, self.tokenizer, vocabulary)
        for note in trained.notes:
            say(note)
        say(f"checkpoint: {trained.path}")
        *plan, last = self.model.backend.plan.summary(forward=True)
        say(*plan, last + reason)

    def tokens(self) -> Iterator[int]:
        """Generate the new tokens."""
        context, count = self.model.config.context, len(self.prompt)
        if count > context:
            self._say(
                f"the prompt has {count} tokens: the model reads the last {context}, its context"
            )
        full = f"the context of {context} tokens is full: its last half is read again"
        end = self.tokenizer.end_of_text
        return sampled(
            self.model,
            self.prompt,
            self.request.tokens,
            self.request.sampling,
            seed=self.request.seed,
            stop=() if end is None else (end,),
            vocabulary=self.tokenizer.vocabulary,
            when_full=cache(lambda: self._say(full)),  # once
        )

    def pieces(self, tokens: Iterator[int]) -> Iterator[str]:
        """Decode `tokens`, which follow the prompt: yield the characters that a token completes."""
        decoder = self.tokenizer.stream()
        for token in self.prompt[-DECODED_AGAIN:]:
            decoder.step(token)
        for token in tokens:
            yield decoder.step(token)
        yield decoder.finish()


def default_recipe(hardware: Hardware) -> tuple[str, str]:
    """The default recipe of a generation, and the reason, for the end of a line."""
    if hardware.device != "cpu" or hardware.cpu_bf16:
        return "bf16", ""
    return "fp32", " (this CPU has no bf16 instructions)"


def tokenizer_for(run: str, name: str | None, trained: Trained) -> Tokenizer:
    """The tokenizer called `name`, by default the tokenizer of `trained`, the model of `run`.
    Raises a UserError if it is unknown, cannot be loaded, or is not the run's tokenizer."""
    tokenizer = tokenizer_of_run(run, name, trained.recorded_tokenizer)
    if tokenizer is not None:
        return tokenizer
    raise UserError(
        f"The tokenizer of {quoted(run)} is unknown: its {trained.shape.vocabulary} tokens may "
        "stand for any text. Give --tokenizer: bytes, gpt2, or the path of a tokenizer.json."
    )


def prompt_tokens(prompt: str, tokenizer: Tokenizer, vocabulary: int) -> list[int]:
    """The prompt's tokens; for an empty prompt, the token that ends a document. Raises a UserError
    for a token that the model does not have, or if an empty prompt has no such token."""
    tokens = tokenizer.begin(prompt)
    if not tokens:
        raise UserError("There is nothing to begin with. Give --prompt TEXT.")
    if max(tokens) >= vocabulary:
        raise UserError(
            f"The prompt has token {max(tokens)}, and the model's vocabulary is {vocabulary}: "
            f"{tokenizer.name} is not the tokenizer that it was trained with. Give that by "
            "--tokenizer."
        )
    return tokens


class _Speed:
    """Measures the speed of reading a prompt of `read` tokens and of writing; `close` prints it."""

    def __init__(self, read: int, model: GPT) -> None:
        self._read, self._model = read, model
        self._written = 0
        self._first_s = self._later_s = 0.0

    def timed(self, tokens: Iterator[int]) -> Iterator[int]:
        """Yield `tokens` and measure the time to generate them, without the consumer's time."""
        while True:
            began = time.perf_counter()
            token = next(tokens, None)
            elapsed_s = time.perf_counter() - began
            if self._first_s == 0.0:
                self._first_s = elapsed_s
            else:
                self._later_s += elapsed_s
            if token is None:
                return
            self._written += 1
            yield token

    def close(self) -> None:
        if self._first_s == 0.0:
            return
        read = f"read {counted(self._read, 'token')} at {self._read / self._first_s:,.0f} tokens/s"
        writing = f"wrote {self._written}"
        if self._written > 1:
            writing += f" at {(self._written - 1) / self._later_s:,.0f} tokens/s"
        plan = self._model.backend.plan
        fp8 = f", {self._model.backend.fp8_gemms():,} FP8 GEMMs" if plan.is_fp8 else ""
        warn(f"{read}, {writing}; in {plan.precision} on {plan.device}{fp8}")


def _print(prompt: str, pieces: Iterator[str]) -> None:
    """Print the prompt and its continuation, a character as soon as it is complete."""
    write_text(prompt)
    try:
        for piece in pieces:
            write_text(piece)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted.") from None
    finally:
        write_text("\n")
