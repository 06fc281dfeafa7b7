"""fp8stack: pretrain GPT-style models in FP8, with the same numerics on a laptop and on a GPU. The
names below are public; they are imported when first used, so that `import fp8stack` is quick."""

# The command sets its handler of Ctrl-C after this file: it imports nothing that takes long.
from fp8stack.lazy import lazy_names
from fp8stack.version import __version__ as __version__

TYPE_CHECKING = False  # typing's, for type checkers alike
if TYPE_CHECKING:
    from fp8stack import numerics
    from fp8stack.backends import build_backend, fp8_state, load_fp8_state
    from fp8stack.errors import UserError
    from fp8stack.estimate.savings import savings
    from fp8stack.evaluation import evaluate
    from fp8stack.exports import export
    from fp8stack.generation import generate
    from fp8stack.model.config import GPTConfig, load_config, plan_for
    from fp8stack.model.convert import convert
    from fp8stack.model.gpt import GPT
    from fp8stack.optim.grad_scaler import LossScaler
    from fp8stack.precision import Hardware, Plan, Recipe, load_recipe, probe, resolve
    from fp8stack.precision.phases import precision_for_phase
    from fp8stack.tokenizer import Tokenizer, load_tokenizer
    from fp8stack.training.load import load
    from fp8stack.training.pretrain import pretrain

_NAMES = {
    "backends": ("build_backend", "fp8_state", "load_fp8_state"),
    "errors": ("UserError",),
    "estimate.savings": ("savings",),
    "evaluation": ("evaluate",),
    "exports": ("export",),
    "generation": ("generate",),
    "model.config": ("GPTConfig", "load_config", "plan_for"),
    "model.convert": ("convert",),
    "model.gpt": ("GPT",),
    "numerics": (),
    "optim.grad_scaler": ("LossScaler",),
    "precision": ("Hardware", "Plan", "Recipe", "load_recipe", "probe", "resolve"),
    "precision.phases": ("precision_for_phase",),
    "tokenizer": ("Tokenizer", "load_tokenizer"),
    "training.load": ("load",),
    "training.pretrain": ("pretrain",),
}
__all__ = [
    "GPT",
    "GPTConfig",
    "Hardware",
    "LossScaler",
    "Plan",
    "Recipe",
    "Tokenizer",
    "UserError",
    "build_backend",
    "convert",
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
    "plan_for",
    "precision_for_phase",
    "pretrain",
    "probe",
    "resolve",
    "savings",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES, [*__all__, "__version__"])
