"""The model of a run in one of its recipes. A run has one model at a time: in another recipe, it is
built again around the same parameters."""

import torch
from torch.distributed.tensor import DTensor

from fp8stack.layers import RngState, build_backend
from fp8stack.layers.backend import continue_from
from fp8stack.layers.delayed import DelayedScaling
from fp8stack.model.config import GPTConfig
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Plan


def model_in(
    plan: Plan,
    config: RunConfig,
    shape: GPTConfig,
    around: GPT | None = None,
    *,
    compiled: bool = False,
) -> GPT:
    """Build the model of a run in the recipe of `plan`, to be wrapped for several ranks.

    Args:
        around: a model of the run in any recipe, whose parameters, buffers, counters of random bits
            and state of delayed scaling the model shares; sharded parameters only once the model
            is sharded as well. None: new ones, as of a run's first step.
        compiled: whether to compile blocks and loss.

    Returns:
        The model. Its `delayed_scaling`, and so its `fp8_state`, is the run's, which waits while
        the model is in another recipe.

    Raises:
        MemoryError: new parameters do not fit into the memory.
    """
    draws = RngState(config.seed) if around is None else around.backend.draws
    backend = build_backend(plan, draws=draws)
    delayed = None if around is None else delayed_scaling(around)
    if backend.delayed is not None and delayed is not None:
        continue_from(backend, delayed)
    backend.weights.only_tracked_changes = True  # only the run's optimizers change them
    backend.vocabulary_multiple = plan.layer("lm_head").out_features  # as padded
    if around is None:
        model = GPT(shape, backend, seed=config.seed)
    else:
        with torch.device("meta"):
            model = GPT(shape, backend, seed=None)
        _share_tensors(around, model)
        model.delayed_scaling = backend.delayed or delayed  # type: ignore[assignment]
    model.recompute = config.activation_checkpointing
    if compiled:
        model.compile_blocks(mode=config.compile_mode)
    return model


def delayed_scaling(model: GPT) -> DelayedScaling | None:
    """The state of delayed scaling of the run that `model` belongs to; None if it has none."""
    state: DelayedScaling | None = getattr(model, "delayed_scaling", None)
    return state


def _share_tensors(source: GPT, model: GPT) -> None:
    """Replace the parameters and saved buffers of `model` by those of `source`, of the same
    names."""
    is_sharded = any(isinstance(parameter, DTensor) for parameter in source.parameters())
    for path, module in () if is_sharded else model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                shared = source.get_parameter(f"{path}.{name}" if path else name)
                module._parameters[name] = shared
    for name in source.config.buffer_shapes():
        path, _, key = name.rpartition(".")
        model.get_submodule(path)._buffers[key] = source.get_buffer(name)
