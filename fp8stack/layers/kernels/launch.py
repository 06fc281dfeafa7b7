"""Launches of Triton kernels. Triton's `run` binds and specializes the arguments and looks up the
compiled kernel at every launch; a `KernelLaunch` does so once.

Imported to launch a kernel, as `triton_kernels`.
"""

# Not torch.library.triton_op, whose kernels inductor launches itself: up to torch 2.13 it drops
# `enable_fp_fusion` (2.14 does not), so products would be contracted, and bytes change.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver


class KernelLaunch:
    """Launches one kernel on tensors of the same dtypes, with the same grid, numbers and constants.

    Triton itself makes the first launch on a device and for an alignment of the tensors, and
    compiles the kernel; later ones call the compiled kernel. Triton makes every launch where it
    interprets kernels, and while a launch hook is installed (Proton, for example, reads the
    arguments).

    Args:
        kernel: a function of Triton, whose parameters are tensors, then numbers, then constants.
        tiles: the size of the grid.
        numbers: the integers.
        constants: the constants, by name.
        options: Triton's options of a launch, such as `num_warps`.
    """

    def __init__(
        self,
        kernel: Any,
        tiles: int,
        numbers: Sequence[int],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self._kernel, self._tiles, self._numbers = kernel, tiles, tuple(numbers)
        self._named = {**constants, **options}
        # Follow the tensors. Triton passes the constants as well, and its launcher skips them.
        self._others = (
            *numbers,
            *(constants[name] for name in kernel.arg_names[-len(constants) :]),
        )
        self._compiled: dict[tuple[int, tuple[int, ...]], CompiledKernel] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Launch the kernel on the current stream of the tensors' device.

        Args:
            tensors: the tensors; those of single bytes are passed as uint8.
        """
        device = tensors[0].get_device()  # -1 on a CPU
        if device < 0 or device == torch.cuda.current_device():
            self._launch(device, tensors)
        else:
            with torch.cuda.device(device):
                self._launch(device, tensors)

    def _launch(self, device: int, tensors: Sequence[Tensor]) -> None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        # Triton compiles a kernel for each combination of tensors that are aligned to 16 bytes.
        key = device, tuple([address & 15 == 0 for address in addresses])
        compiled = self._compiled.get(key)
        hooks = knobs.runtime
        if compiled is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            tensors = [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in tensors]
            launched = self._kernel[(self._tiles,)](*tensors, *self._numbers, **self._named)
            if isinstance(launched, CompiledKernel):
                self._compiled[key] = launched
            return
        # The arguments are those of `JITFunction.run` (Triton 3.6 to 3.9), with addresses in place
        # of tensors, and no hooks.
        stream = driver.active.get_current_stream(max(device, 0))
        function, metadata = compiled.function, compiled.packed_metadata
        compiled.run(
            *(self._tiles, 1, 1, stream, function, metadata, None, None, None),
            *addresses,
            *self._others,
        )
