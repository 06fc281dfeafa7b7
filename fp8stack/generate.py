"""`fp8stack generate`: text that a trained model writes, token by token."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache

from fp8stack.errors import Interrupted, UserError, quoted
from fp8stack.model.gpt import GPT
from fp8stack.model.sampling import Sampling, generate
from fp8stack.precision import Hardware, probe
from fp8stack.tokenizer import Tokenizer, load_tokenizer
from fp8stack.training.load import find_checkpoint, model_in
from fp8stack.training.setup.datasets import tokenizer_of_run


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be written."""

    run: str  # a run's folder, or a checkpoint's
    prompt: str  # what the text begins with
    tokens: int  # how many to write at most
    seed: int
    sampling: Sampling
    # What the model is run in; None for bf16 where the machine multiplies it, else fp32.
    recipe: str | None = None
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


def write(request: Request) -> None:
    """Print the prompt and what the model makes of it, as it comes; what was used and how fast it
    was, on stderr.

    Raises:
        UserError: no such run, tokenizer or recipe, or a prompt that the model cannot read.
        NoUsableCheckpoint: the run's checkpoints are damaged.
        NumericFailure: the model gives logits that are not finite.
        Interrupted: by Ctrl-C.
    """
    hardware = probe(request.device)
    checkpoint, path, passed_over = find_checkpoint(request.run)
    recipe, why = (request.recipe, "") if request.recipe else default_recipe(hardware)
    model = model_in(recipe, checkpoint, path, hardware, request.backend)
    tokenizer = tokenizer_for(request.run, model.config.vocabulary, request.tokenizer)
    prompt = prompt_tokens(request.prompt, tokenizer, model.config.vocabulary)
    for reason in passed_over:
        _say(f"passed over: {reason}")
    _say(f"checkpoint: {path}")
    _say("\n".join(model.backend.plan.summary()) + why)
    context, count = model.config.context, len(prompt)
    if count > context:
        _say(f"the prompt has {count} tokens: the model reads the last {context}, its context")
    full = f"the context of {context} tokens is full"
    stream = generate(
        model,
        prompt,
        request.tokens,
        request.sampling,
        seed=request.seed,
        stop=() if tokenizer.end_of_text is None else (tokenizer.end_of_text,),
        vocabulary=tokenizer.vocabulary,
        when_full=cache(lambda: _say(f"{full}: its last half is read again")),  # once
    )
    with closing(_Speed(min(count, context), model)) as speed:
        _print(request.prompt, prompt, speed.watched(stream), tokenizer)


def default_recipe(hardware: Hardware) -> tuple[str, str]:
    """The recipe to write in where none is asked for, and why, for the end of a line."""
    if hardware.device == "cuda" or hardware.cpu_bf16:
        return "bf16", ""
    return "fp32", " (this CPU has no bf16 instructions)"


def tokenizer_for(run: str, vocabulary: int, name: str | None) -> Tokenizer:
    """The tokenizer called `name`, or the run's; bytes if the run does not say and has 256 tokens.
    Raises a UserError if it cannot be loaded, or is not known."""
    found = tokenizer_of_run(run, name)
    if found is not None:
        return found
    if vocabulary == 256:
        return load_tokenizer("bytes")
    raise UserError(
        f"{quoted(run)} does not say what its {vocabulary} tokens are. Give --tokenizer: bytes, "
        "gpt2, or the path of a tokenizer.json."
    )


def prompt_tokens(prompt: str, tokenizer: Tokenizer, vocabulary: int) -> list[int]:
    """The prompt's tokens; of an empty one, what ends a document. Raises a UserError for a token
    that the model does not know, or an empty prompt where no token ends a document."""
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


REMEMBERED = 64  # tokens of the prompt that may decide about the first character after it


class _Speed:
    """How fast a prompt of `read` tokens is read and tokens are written; told when it is closed."""

    def __init__(self, read: int, model: GPT) -> None:
        self._read, self._model = read, model
        self._written = 0
        self._first_s = self._rest_s = 0.0

    def watched(self, tokens: Iterator[int]) -> Iterator[int]:
        """`tokens`, timed; what whoever takes them does in between does not count."""
        while True:
            began = time.perf_counter()
            token = next(tokens, None)
            taken = time.perf_counter() - began
            if self._first_s == 0.0:
                self._first_s = taken
            else:
                self._rest_s += taken
            if token is None:
                return
            self._written += 1
            yield token

    def close(self) -> None:
        if self._first_s == 0.0:
            return
        read = f"read {self._read} tokens at {self._read / self._first_s:,.0f} tokens/s"
        wrote = f"wrote {self._written}"
        if self._written > 1:
            wrote += f" at {(self._written - 1) / self._rest_s:,.0f} tokens/s"
        plan = self._model.backend.plan
        fp8 = f", {self._model.backend.fp8_gemms():,} FP8 GEMMs" if plan.is_fp8 else ""
        _say(f"{read}, {wrote}; in {plan.precision} on {plan.device}{fp8}")


def _print(text: str, prompt: Sequence[int], tokens: Iterator[int], tokenizer: Tokenizer) -> None:
    """Print a prompt and what follows, a character as soon as it is whole."""
    decoder = tokenizer.stream()
    for token in prompt[-REMEMBERED:]:
        decoder.step(token)
    _put(text)
    try:
        for token in tokens:
            _put(decoder.step(token))
        _put(decoder.finish())
    except KeyboardInterrupt:
        raise Interrupted("Interrupted.") from None
    finally:
        _put("\n")


def _put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
