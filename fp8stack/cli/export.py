"""The command `fp8stack export`."""

from typing import Annotated

from fp8stack.cli import completion, options
from fp8stack.cli.options import option
from fp8stack.common.errors import UserError
from fp8stack.common.terminal import say, warn

FORMAT = option(
    "Format: hf (transformers), fp8 (transformers, vLLM), safetensors. [hf]",
    autocompletion=completion.EXPORT_FORMATS,
)
SCHEME = option(
    "Weights: tensor, channel, block, deepseek, mxfp4, mxfp6 or nvfp4. [the run's]",
    autocompletion=completion.EXPORT_SCHEMES,
)
OVERWRITE = option("Delete an earlier export in --out first.", "--overwrite")
PUSH = option("Upload the folder to this repository of the Hugging Face Hub, owner/name.")
PRIVATE = option("With --push: make the repository private.", "--private")


def export(
    run: Annotated[str, options.RUN],
    out: Annotated[str, option("Folder to create.")],
    format: Annotated[str, FORMAT] = "hf",
    dtype: Annotated[str, option("Dtype of tensors not in FP8: fp32 or bf16. [fp32]")] = "fp32",
    tokenizer: Annotated[str | None, options.TOKENIZER] = None,
    scheme: Annotated[str | None, SCHEME] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
    push: Annotated[str | None, PUSH] = None,
    private: Annotated[bool, PRIVATE] = False,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Export a trained model to a folder that transformers, vLLM or safetensors load."""
    from fp8stack.common import hub
    from fp8stack.trained.export import write_export

    if push is None and private:
        raise UserError("--private needs --push. Leave it out, or give --push owner/name.")
    if push is not None:
        if format == "safetensors":
            raise UserError("--push needs --format hf or fp8. Leave it out.")
        hub.require_pushable(push)
    more = {"tokenizer": tokenizer, "scheme": scheme, "repository": push}
    written = write_export(run, format, out, dtype=dtype, overwrite=overwrite, **more)
    for note in written.notes:
        warn(f"note: {note}")
    if not json:
        say(f"export: {written.line}")
    address = {}
    if push is not None:
        message = f"{written.title}, written by fp8stack export"
        address = {"url": hub.push(written.out, push, private=private, message=message)}
    if json:
        options.print_json(written.as_json() | address)
    elif address:
        say(f"pushed: {address['url']}")
