"""FP8 as a precision plugin of Lightning's Trainer."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from fp8stack.backends import fp8_state, load_fp8_state
from fp8stack.errors import UserError
from fp8stack.model.convert import convert
from fp8stack.precision import Plan, probe, resolve

log = logging.getLogger("fp8stack")


def _base() -> Any:
    """`Precision` of the package that the user's Trainer is from: `lightning` has a copy of all
    classes of `pytorch_lightning`, and each Trainer takes its own alone."""
    loaded = "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules
    home = "lightning.pytorch" if loaded and find_spec("lightning") else "pytorch_lightning"
    return import_module(f"{home}.plugins.precision").Precision


class FP8Precision(_base()):  # type: ignore[misc]
    """Converts the model before training starts, and keeps its FP8 state in checkpoints.

    Pass it to the Trainer: `Trainer(plugins=[FP8Precision("delayed")])`. Modules that you converted
    yourself, for instance in `configure_model`, are left as they are, and their state is kept.

    Args:
        recipe: a recipe by name, or the plan that `fp8stack.resolve` gave.
        modules: the attributes of the LightningModule to convert, such as `("model",)`. By default
            each one that contains linear layers. A linear layer that is an attribute by itself is
            not converted.
        exclude: patterns of module paths to leave as they are, relative to each of `modules`.

    Raises:
        UserError: what `fp8stack.convert` raises; or there is nothing to convert.
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
        self.exclude = exclude
        self._module: nn.Module = nn.Module()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert `module` in place, once; Lightning calls this before it makes optimizers."""
        self._module = module
        if any(hasattr(part, "fp8_plan") for part in module.modules()):
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
                known = ", ".join(children)
                raise UserError(f"FP8Precision: no module '{name}'. Modules: {known}.")
            convert(children[name], self.plan, self.exclude)
        for name, child in children.items():
            if isinstance(child, nn.Linear) and name not in self.modules:
                log.info(f"{name}: unchanged, a linear layer by itself in the LightningModule")
        return module

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
                "The checkpoint has no FP8 state: it starts anew, and losses will differ from "
                "those of an uninterrupted run."
            )


def _has_linears(child: nn.Module) -> bool:
    """Whether there are linear layers below `child`, Conv1D of transformers included."""
    kinds = {kind.__name__ for part in list(child.modules())[1:] for kind in type(part).__mro__}
    return not kinds.isdisjoint(("Linear", "Conv1D"))
