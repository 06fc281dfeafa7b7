"""FP8 state in the checkpoints of other libraries' training loops. One module per library, which
alone imports it; `FP8State` is for every loop that saves objects with a `state_dict`."""

from fp8stack.integrations.fp8_state import FP8State

__all__ = ["FP8State"]
