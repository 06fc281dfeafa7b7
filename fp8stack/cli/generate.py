"""The command `fp8stack generate`."""

from pathlib import Path
from typing import Annotated

from fp8stack.cli import completion, options
from fp8stack.cli.options import option
from fp8stack.common.errors import UserError, quoted

TEMPERATURE = option("Sampling temperature; 0 takes the likeliest token. [0.8]")
TOP_P = option("Sample from the likeliest tokens of this total probability. [all]")
RECIPE = option(
    "Precision recipe or TOML file. [bf16 if the machine has it, else fp32]",
    autocompletion=completion.RECIPES,
)


def generate(
    run: Annotated[str, options.RUN],
    prompt: Annotated[str | None, option("Prompt. [the start of a document]")] = None,
    prompt_file: Annotated[str | None, option("File with the prompt, in UTF-8.")] = None,
    tokens: Annotated[int, option("Tokens to generate at most. [256]")] = 256,
    seed: Annotated[int, option("Seed for sampling. [0]")] = 0,
    temperature: Annotated[float, TEMPERATURE] = 0.8,
    top_k: Annotated[int | None, option("Sample from the k likeliest tokens. [all]")] = None,
    top_p: Annotated[float | None, TOP_P] = None,
    recipe: Annotated[str | None, RECIPE] = None,
    backend: Annotated[str, options.BACKEND] = "auto",
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    device: Annotated[str, options.DEVICE] = "auto",
    threads: Annotated[int | None, options.THREADS_NOW] = None,
) -> None:
    """Generate text with a trained model: the text on stdout, figures on stderr."""
    if prompt is not None and prompt_file is not None:
        raise UserError("Give --prompt or --prompt-file, not both.")
    if prompt_file is not None:
        prompt = _read(prompt_file)
    from fp8stack.model.sampling import Sampling
    from fp8stack.trained.generate import GenerationOptions, write

    request = GenerationOptions(
        run=run,
        prompt=prompt or "",
        tokens=tokens,
        seed=seed,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        recipe=recipe,
        tokenizer=tokenizer,
        device=device,
        backend=backend,
    )
    write(request)


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8-sig")  # without a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompt-file {quoted(name)} is not UTF-8 text: byte {error.start} is invalid. "
            "Give a file in UTF-8."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or "invalid path"
        raise UserError(f"Cannot read --prompt-file {quoted(name)}: {reason}.") from error
