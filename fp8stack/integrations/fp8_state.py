"""A model's FP8 state as an object with `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fp8stack.layers import fp8_state, load_fp8_state
from fp8stack.layers.delayed import DelayedScaling


def apply_pending_updates(model: nn.Module) -> None:
    """Call `apply_pending_update` of each converted module in `model`."""
    for module in model.modules():
        delayed = getattr(module, "delayed_scaling", None)
        if isinstance(delayed, DelayedScaling):
            delayed.apply_pending_update()


class FP8State:
    """The FP8 state of a converted model, for loops that checkpoint objects with a `state_dict`.

    Register it with accelerate (`accelerator.register_for_checkpointing(FP8State(model))`), or put
    it next to the model and the optimizer in the dictionary that `torch.distributed.checkpoint`
    saves, where it is a `Stateful`.

    Args:
        model: a model that `convert` was called on, or its wrapper.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        """The FP8 state between two steps, see `fp8stack.fp8_state`. All ranks must call this."""
        apply_pending_updates(self.model)
        return fp8_state(self.model)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore a `state_dict`. Raises what `fp8stack.load_fp8_state` raises."""
        load_fp8_state(self.model, state_dict)
