"""FP8 as a precision plugin of Lightning's Trainer."""

from __future__ import annotations

import fnmatch
import logging
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from fp8stack.common.errors import UserError, quoted
from fp8stack.integrations.fp8_state import apply_pending_updates
from fp8stack.layers import fp8_state, load_fp8_state
from fp8stack.model.convert import convert
from fp8stack.model.convertible import find_layers
from fp8stack.model.expert_layouts import find_expert_weights
from fp8stack.precision import Plan, probe, resolve

log = logging.getLogger("fp8stack")


def _base() -> Any:
    """The class `Precision` of the package that the user's Trainer comes from: `lightning` copies
    all classes of `pytorch_lightning`, and a Trainer accepts only the plugins of its package."""
    loaded = "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules
    home = "lightning.pytorch" if loaded and find_spec("lightning") else "pytorch_lightning"
    return import_module(f"{home}.plugins.precision").Precision


class FP8Precision(_base()):  # type: ignore[misc]
    """Converts the model before training starts, and keeps its FP8 state in checkpoints.

    Pass it to the Trainer: `Trainer(plugins=[FP8Precision("delayed")])`. Modules that you converted
    yourself, for instance in `configure_model`, are left as they are, and their state is kept.

    Args:
        recipe: the name of a recipe, or a plan from `fp8stack.resolve`.
        modules: the attributes of the LightningModule to convert, such as `("model",)`. By default
            every attribute that contains linear layers. An attribute that is itself a linear layer
            is not converted.
        exclude: patterns of module paths to leave unchanged, relative to each of `modules`. Each
            must match a layer in one of them.

    Raises:
        UserError: `fp8stack.convert` raises one, or there is nothing to convert.
    """

    def __init__(
        self,
        recipe: str | Plan = "auto",
        *,
        modules: Iterable[str] = (),
        exclude: Iterable[str] = (),
    ) -> None:
        self.plan = recipe if isinstance(recipe, Plan) else resolve(recipe, probe())
        self.modules = (modules,) if isinstance(modules, str) else tuple(modules)
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self._module: nn.Module = nn.Module()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert `module` in place, once; Lightning calls this before it makes optimizers."""
        self._module = module
        if any(hasattr(submodule, "fp8_plan") for submodule in module.modules()):
            return module
        children = dict(module.named_children())
        names = self.modules or [name for name, child in children.items() if _has_linears(child)]
        if not names:
            raise UserError(
                "FP8Precision: no attribute of the LightningModule contains linear layers. Wrap "
                "them in a module, such as self.model = nn.Sequential(...)."
            )
        for name in names:
            if name not in children:
                module_names = ", ".join(children)
                raise UserError(f"FP8Precision: no module '{name}'. Modules: {module_names}.")
        patterns = self._patterns({name: children[name] for name in names})
        for name in names:
            convert(children[name], self.plan, patterns[name])
        for name, child in children.items():
            if isinstance(child, nn.Linear) and name not in self.modules:
                log.info(f"{name}: unchanged, a linear layer by itself in the LightningModule")
        return module

    def _patterns(self, modules: Mapping[str, nn.Module]) -> dict[str, list[str]]:
        """The patterns of `exclude` that match a layer, by module. Raises a UserError if a pattern
        matches a layer in none."""
        paths = {
            name: [path for layer in find_layers(module, ()).values() for path in layer.paths]
            for name, module in modules.items()
        }
        matching = {
            name: [pattern for pattern in self.exclude if fnmatch.filter(paths[name], pattern)]
            for name in modules
        }
        for pattern in self.exclude:
            if not any(pattern in patterns for patterns in matching.values()):
                raise UserError(
                    f"FP8Precision: the pattern '{quoted(pattern)}' of `exclude` matches no layer "
                    f"in {', '.join(modules)}."
                )
        return matching

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step, and update the scales before the model is evaluated or saved."""
        result = super().optimizer_step(*args, **kwargs)
        apply_pending_updates(self._module)
        return result

    def state_dict(self) -> dict[str, Tensor]:
        """The FP8 state; Lightning saves it as `checkpoint["FP8Precision"]`."""
        return fp8_state(self._module)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore the FP8 state. Raises what `fp8stack.load_fp8_state` raises."""
        load_fp8_state(self._module, state_dict)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Warn if a checkpoint has no FP8 state."""
        if type(self).__qualname__ not in checkpoint and fp8_state(self._module):
            log.warning(
                "The checkpoint has no FP8 state: none is restored, and losses will differ from "
                "those of the run that saved it. Save checkpoints with the FP8Precision plugin and "
                "without ModelCheckpoint(save_weights_only=True)."
            )


def _has_linears(child: nn.Module) -> bool:
    """Whether `child` contains linear layers, including transformers' Conv1D and experts."""
    kinds = {
        kind.__name__ for submodule in list(child.modules())[1:] for kind in type(submodule).__mro__
    }
    return not kinds.isdisjoint(("Linear", "Conv1D")) or bool(find_expert_weights(child))
