"""The model card of an exported folder, a `README.md` for the Hugging Face Hub."""

import json
import re
from importlib.resources import files

import torch
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fp8stack.common import presets
from fp8stack.common.version import __version__
from fp8stack.planning.run_config import RunConfig
from fp8stack.trained.export.format_files import Files, ModelSource
from fp8stack.training.metrics.read import read_metrics
from fp8stack.training.run_plans import context_of

CARD = "README.md"
MARK = "<!-- Written by fp8stack export. -->"
"""A line of every card. A README.md without it was not written by fp8stack."""
_ACTIVE = re.compile(r"[^\w .,;+±%()/='-]")


def model_card(source: ModelSource, written: Files, repository: str | None) -> str:
    """The text of the model card.

    Args:
        source: the model. Facts that its run's folder lacks are left out.
        written: the folder's other files.
        repository: `owner/name` on the Hub; None if the folder is not pushed.
    """
    recipe = str(source.plan["recipe"]["name"])
    quantization = json.loads(written.texts["config.json"]).get("quantization_config", {})
    method = str(quantization.get("quant_method", ""))
    tags = ["fp8stack", visible(recipe), *([method] if method else [])]
    config = source.info.get("config")
    run = config and presets.parse(RunConfig, config, f"config of {source.path}")
    environment = Environment(
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else visible(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = files("fp8stack.trained.export").joinpath("card.md.jinja").read_text("utf-8")
    return environment.from_string(text).render(
        mark=Markup(MARK),
        tags=list(dict.fromkeys(tags)),
        repository=repository,
        title=written.title,
        method=method,
        converted=not source.info,
        recipe=recipe,
        backend=source.plan.get("backend"),
        shape=source.config,
        step=source.step,
        tokens=source.step * run.batch * context_of(run, source.config) if run else None,
        began_with_weights=bool(run and run.init_from),
        loss=_last_val_loss(source),
        version=__version__,
        torch_version=source.info.get("versions", {}).get("torch", torch.__version__),
        number=lambda value: f"{value:,}",
    )


def visible(text: str) -> str:
    r"""`text` with characters escaped that Markdown or HTML may act on, also in a code span.

    >>> visible("<img>\n`a`|b")
    '\\x3cimg\\x3e\\x0a\\x60a\\x60\\x7cb'
    """
    return _ACTIVE.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _last_val_loss(source: ModelSource) -> tuple[int, float] | None:
    """The last validation loss up to the checkpoint, and its step."""
    if source.run is None:
        return None
    values = zip(*read_metrics(source.run).column("val_loss"), strict=True)
    return max(((step, loss) for step, loss in values if step <= source.step), default=None)
