"""A saved run, resumed as another than it is: what is refused, and with which words."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8stack.common.errors import UserError
from fp8stack.training.run import Run
from fp8stack.training.setup.start import set_up
from tests.conftest import contents
from tests.faults.numeric.small_runs import small_run, trained


@dataclass(frozen=True)
class Other:
    """Changed keys of a resumed run, and the difference that the error must name."""

    keys: dict[str, Any]
    named: str


# Key, and what it is on resumption and was.
PLAIN: list[tuple[str, Any, Any]] = [
    ("seed", 3, 0), ("batch", 8, 4), ("context", 16, 32), ("lr", 0.1, 0.003),
    ("schedule", "wsd", "cosine"), ("warmup_steps", 5, 2), ("decay_fraction", 0.5, 0.2),
    ("min_lr", 0.5, 0.1), ("weight_decay", 0.0, 0.1), ("beta1", 0.8, 0.9), ("beta2", 0.99, 0.95),
    ("adam_eps", 1e-6, 1e-8), ("clip", 0.5, 1.0), ("clip_mode", "value", "norm"),
    ("clip_percentile", 90.0, 95.0), ("clip_window", 50, 100), ("optimizer", "muon", "adamw"),
    ("loss_scale", 8.0, None), ("first_loss_scale", 8.0, 65536.0), ("loss_scale_interval", 9, 2000),
    ("loss_scale_growth", 4.0, 2.0), ("loss_scale_backoff", 0.25, 0.5),
    ("min_loss_scale", 2.0, 1.0), ("max_loss_scale", 1e6, 262144.0), ("momentum", 0.5, 0.9),
    ("grad_compression", "bf16", "none"), ("data_order", "epochs", "random"),
    ("document_mask", True, False),
]  # fmt: skip
OTHERS = [
    Other({"recipe": "current"}, "recipe is 'current' here and 'delayed' in the checkpoint."),
    Other({"recipe": "fp32"}, "recipe is 'fp32' here and 'delayed'"),
    Other({"recipe_overrides": {"margin": 1}}, "margin is 1 here and 0"),
    Other({"recipe_overrides": {"history_length": 16}}, "history_length is 16 here and 1024"),
    Other({"model_overrides": {"vocabulary": 300}}, "model.vocabulary is 300 here and 256"),
    Other({"model_overrides": {"layers": 2}}, "model.layers is 2 here and 1"),
    Other({"model_overrides": {"activation": "gelu"}}, "model.activation is 'gelu' here"),
    Other({"data": "other.txt"}, "the data are not those that the run was trained on"),
    Other({"phases": "default"}, "phases is"),
    *(Other({key: now}, f"{key} is {now!r} here and {was!r}") for key, now, was in PLAIN),
]


def saved_run(folder: Path) -> Path:
    """A run in delayed scaling of four steps, saved."""
    run = small_run(folder, "saved", "delayed", steps=4)
    trained(run)
    (folder / "other.txt").write_text("some other text\n" * 500)
    return run.folder.path


def resumed_as(saved: Path, keys: dict[str, Any]) -> Run:
    """The saved run, resumed with some keys changed. Raises what `set_up` raises."""
    shape = {"layers": 1, "heads": 2, "width": 32}
    settings = {key: value for key, value in keys.items() if key != "model_overrides"}
    if "data" in settings:
        settings["data"] = str(saved.parent / settings["data"])
    if "model_overrides" in keys:
        settings["model_overrides"] = shape | keys["model_overrides"]
    return set_up(settings, None, [], str(saved))


def refusal(saved: Path, change: Other) -> str:
    """The problem with the answer to a wrong resumption, "" if none."""
    before = contents(saved)
    try:
        resumed_as(saved, change.keys).folder.release()
    except UserError as error:
        text = str(error)
        if error.exit_code != 2 or "\n" in text or change.named not in text:
            return f"exit code {error.exit_code}: {text}"
        return "" if contents(saved) == before else "the run's files were changed"
    return "the run was resumed"
