"""fp8stack: pretrain GPT-style models in FP8, with the same numerics on a laptop and on a GPU. The
names below are public. They are imported on first use, so that `import fp8stack` is fast."""

# This file imports nothing slow, because the command handles Ctrl-C only after it.
from fp8stack.common.version import __version__ as __version__

TYPE_CHECKING = False  # as in `typing`, without importing it
if TYPE_CHECKING:
    from fp8stack import numerics
    from fp8stack.common.errors import UserError
    from fp8stack.data.tokenizer import Tokenizer, load_tokenizer
    from fp8stack.layers import build_backend, fp8_state, load_fp8_state
    from fp8stack.model.config import GPTConfig, load_config, plan_for
    from fp8stack.model.conversion_plan import plan
    from fp8stack.model.convert import convert
    from fp8stack.model.converted import delayed_scaling_of, plan_of
    from fp8stack.model.gpt import GPT
    from fp8stack.planning.phases import precision_for_phase
    from fp8stack.planning.run_config import RunConfig
    from fp8stack.planning.savings import savings
    from fp8stack.precision import Hardware, Plan, Recipe, load_recipe, probe, resolve
    from fp8stack.trained.evaluate import evaluate
    from fp8stack.trained.export import export
    from fp8stack.trained.generate import generate
    from fp8stack.training.load import load
    from fp8stack.training.optim.grad_scaler import LossScaler
    from fp8stack.training.pretrain import pretrain
    from fp8stack.training.telemetry.operand_errors import Telemetry

_NAMES = {
    "layers": ("build_backend", "fp8_state", "load_fp8_state"),
    "common.errors": ("UserError",),
    "planning.run_config": ("RunConfig",),
    "planning.savings": ("savings",),
    "trained.evaluate": ("evaluate",),
    "trained.export": ("export",),
    "trained.generate": ("generate",),
    "model.config": ("GPTConfig", "load_config", "plan_for"),
    "model.conversion_plan": ("plan",),
    "model.convert": ("convert",),
    "model.converted": ("delayed_scaling_of", "plan_of"),
    "model.gpt": ("GPT",),
    "training.optim.grad_scaler": ("LossScaler",),
    "precision": ("Hardware", "Plan", "Recipe", "load_recipe", "probe", "resolve"),
    "planning.phases": ("precision_for_phase",),
    "data.tokenizer": ("Tokenizer", "load_tokenizer"),
    "training.load": ("load",),
    "training.pretrain": ("pretrain",),
    "training.telemetry.operand_errors": ("Telemetry",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "GPT",
    "GPTConfig",
    "Hardware",
    "LossScaler",
    "Plan",
    "Recipe",
    "RunConfig",
    "Telemetry",
    "Tokenizer",
    "UserError",
    "build_backend",
    "convert",
    "delayed_scaling_of",
    "evaluate",
    "export",
    "fp8_state",
    "generate",
    "load",
    "load_config",
    "load_fp8_state",
    "load_recipe",
    "load_tokenizer",
    "numerics",
    "plan",
    "plan_for",
    "plan_of",
    "precision_for_phase",
    "pretrain",
    "probe",
    "resolve",
    "savings",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "numerics":
        return import_module("fp8stack.numerics")
    if name in _MODULES:
        return getattr(import_module(f"fp8stack.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'fp8stack' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
