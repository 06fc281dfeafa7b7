"""Sampling of tokens from a model, reproducible by seed. V vocabulary."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8stack.common.errors import NumericFailure, UserError
from fp8stack.layers.compiler import without_compiled_code
from fp8stack.layers.weight_cache import cached_weights
from fp8stack.model.gpt import GPT


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for sampling the next token.

    Attributes:
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: draw from the k most likely tokens; None: from all.
        top_p: after `top_k`, draw from the smallest set of most likely tokens with at least this
            total probability (nucleus sampling, arXiv 1904.09751); None: from all.

    Raises:
        UserError: a number is out of range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature {self.temperature} is no temperature. Use 0 or more.")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"--top-k {self.top_k} leaves no token. Use 1 or more.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"--top-p {self.top_p} is no probability. Use more than 0, at most 1.")


def filtered(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """The logits [V] divided by a temperature above 0, with minus infinity for tokens that are
    excluded. Tokens that tie with the last of `top_k` are not excluded."""
    logits_V = logits_V / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits_V):
        least = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ascending_V, order_V = logits_V.sort()
        excluded_V = ascending_V.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        excluded_V[-1] = False  # never the most likely token
        logits_V = logits_V.index_fill(0, order_V[excluded_V], -torch.inf)
    return logits_V


def draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw the next token on the CPU. Raises a NumericFailure if a logit is not finite."""
    logits_V = logits_V.float().cpu()
    if not logits_V.isfinite().all():
        raise NumericFailure(
            "The model's logits are not finite. Take an older checkpoint, or another recipe."
        )
    if sampling.temperature < 1e-20:  # dividing by less would overflow
        return int(logits_V.argmax())
    chances_V = filtered(logits_V, sampling).softmax(dim=-1)
    return int(torch.multinomial(chances_V, 1, generator=generator))


def generate(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    *,
    seed: int,
    stop: Collection[int] = (),
    vocabulary: int | None = None,
    when_full: Callable[[], None] = lambda: None,
) -> Iterator[int]:
    """Yield up to `count` tokens that continue `prompt`.

    Sampling depends only on `seed` and does not change torch's RNG state. A compiled model runs
    uncompiled, and its train or eval mode is restored. Only the end of a prompt longer than the
    context is used. When the context is full, `when_full` is called, and the model continues from
    the context's last half.

    Args:
        stop: tokens that end the text; they are not yielded.
        vocabulary: only tokens below this are sampled; default: the model's vocabulary.

    Raises:
        ValueError: an empty prompt.
        NumericFailure: the model's logits are not finite.
    """
    if not prompt:
        raise ValueError("A model continues a prompt of one token or more.")
    context = model.config.context
    generator = torch.Generator().manual_seed(seed)
    cache = model.new_cache(tokens=min(context, len(prompt) + count))
    tokens = list(prompt)
    new = tokens[-context:]
    with cached_weights(model):
        for _ in range(count):
            if cache.length + len(new) > context:
                when_full()
                cache.length = 0
                new = tokens[-max(context // 2, 1) :]
            with _inference(model):
                window = torch.tensor([new], device=model.embedding.weight.device)
                logits_V: Tensor = model(window, cache=cache)[0, -1]
            token = draw(logits_V[:vocabulary], sampling, generator)
            if token in stop:
                return
            yield token
            tokens.append(token)
            new = [token]


@contextmanager
def _inference(model: GPT) -> Iterator[None]:
    """Disable gradients, dropout and compilation, which each new length would trigger again."""
    was_training = model.training
    if was_training:
        model.eval()
    try:
        with torch.no_grad(), without_compiled_code():
            yield
    finally:
        if was_training:
            model.train()
