"""A pretended GPU: torch traces and compiles for it on a machine without one.

`pretend` changes torch in this process permanently: call it in a separate process. torch then
generates the same graphs and Triton code for CUDA tensors as the installed versions do on a real
GPU, but nothing can run. Attention is an opaque operator, as cuDNN's and FlashAttention's kernels
are to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

CUDA = torch.device("cuda", 0)
# Multiprocessors, registers and threads per multiprocessor, and shared memory per block, from
# NVIDIA's CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". The number
# of multiprocessors is the one of a product: L4, H200, B200, RTX 5090.
_SIZES = {
    (8, 9): (58, 65536, 1536, 101_376),
    (9, 0): (132, 65536, 2048, 232_448),
    (10, 0): (148, 65536, 2048, 232_448),
    (12, 0): (170, 65536, 1536, 101_376),
}


def properties(capability: tuple[int, int] = (9, 0)) -> Any:
    """The properties of the GPU that torch sees.

    Raises:
        KeyError: the capability is not 8.9, 9.0, 10.0 or 12.0.
    """
    processors, registers, threads, shared = _SIZES[capability]
    return SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        name=f"pretended sm{capability[0]}{capability[1]}",
        total_memory=150_000_000_000,
        multi_processor_count=processors,
        regs_per_multiprocessor=registers,
        max_threads_per_multi_processor=threads,
        shared_memory_per_block_optin=shared,
        warp_size=32,
    )


def cuda_functions(capability: tuple[int, int] = (9, 0)) -> dict[str, Callable[..., Any]]:
    """Replacements for the functions of `torch.cuda` by which a program finds the GPU."""
    gpu = properties(capability)
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: gpu,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: gpu.name,
    }


def pretend(capability: tuple[int, int]) -> None:
    """Make this process trace and compile for such a GPU."""
    _find_the_gpu(capability)
    _fake_tensors_may_be_on_it()
    _compile_without_running()
    functional: Any = torch.nn.functional
    functional.scaled_dot_product_attention = _attend


def _find_the_gpu(capability: tuple[int, int]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    nothing = {
        "current_device": lambda: 0,
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: None,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "is_current_stream_capturing": lambda: False,
    }
    for name, function in {**cuda_functions(capability), **nothing}.items():
        setattr(torch.cuda, name, function)
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.version.cuda = torch.version.cuda or "13.0"
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_active_torch_device=lambda: CUDA,
        )
    )


def _fake_tensors_may_be_on_it() -> None:
    """Allow fake tensors on the GPU. Autograd asks for a tensor's stream, which a torch without
    CUDA does not have, so it sees the device "meta", where fake tensors really are. Python sees
    CUDA."""
    import torch._dynamo.polyfills.loader  # before `_make_subclass` has another signature
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    make, normalize = Tensor._make_subclass, FakeTensor._normalize_fake_device

    def make_subclass(cls: Any, data: Any, requires_grad: bool = False, **options: Any) -> Any:
        if issubclass(cls, FakeTensor):
            options |= {"dispatch_device": False, "device_for_backend_keys": data.device}
        return make(cls, data, requires_grad, **options)

    def normalized(device: torch.device) -> torch.device:
        return normalize(CUDA if device.type == "meta" else device)

    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    patched: Any = FakeTensor
    # The operator has a kernel for "meta", so autograd would not decompose it.
    loss = torch.ops.aten.nll_loss.default
    loss.py_impl(torch._C.DispatchKey.AutogradMeta)(loss.decompose)
    patched._normalize_fake_device = staticmethod(normalized)
    patched.is_meta = property(lambda self: False)
    patched.data_ptr = lambda self: 0
    tensor: Any = Tensor
    tensor._make_subclass = staticmethod(make_subclass)


def _compile_without_running() -> None:
    from torch._inductor import config
    from torch._inductor.fx_passes import fuse_attention, pad_mm
    from torch._inductor.runtime import triton_helpers

    triton_helpers.set_driver_to_gpu = lambda: None

    # Both run tensors on the device, for patterns that our models do not have.
    patterns: Any
    for patterns, name in ((fuse_attention, "_sfdp_init"), (pad_mm, "_pad_mm_init")):
        setattr(patterns, name, lambda *args: None)
    config.force_disable_caches = True
    config.use_static_triton_launcher = False  # keeps no PTX
    config.joint_graph_constant_folding = False  # would compute on the device
    config.joint_custom_pre_pass = _without_meta
    copy = fx.GraphModule.__deepcopy__

    def copied(self: fx.GraphModule, memo: Any) -> Any:
        with unset_fake_temporarily():  # constants in a graph are real
            return copy(self, memo)

    fx.GraphModule.__deepcopy__ = copied  # type: ignore[method-assign]


def _without_meta(graph: fx.Graph) -> None:
    """Replace the device "meta", which autograd saw, by the GPU."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.prims.device_put.default):
        if node.args[1].type == "meta":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in graph.nodes:
        if getattr(node.kwargs.get("device"), "type", "") == "meta":
            node.update_kwarg("device", CUDA)


# Attention


@torch.library.custom_op("pretended::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty tensors for the output and a float32 log-sum-exp per query, in FlashAttention's
    layout. Attention is causal without a mask; a mask is added to the scores."""
    return _by_token(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


_attention.register_fake(lambda *tensors: _attention._init_fn(*tensors))


@torch.library.custom_op("pretended::attention_backward", mutates_args=())
def _attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, y: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _by_token(q), _by_token(k), _by_token(v)


_attention_backward.register_fake(lambda *tensors: _attention_backward._init_fn(*tensors))


def _by_token(like: Tensor) -> Tensor:
    """An empty tensor [B, H, T, E] whose memory is in the order [B, T, H, E]."""
    B, H, T, E = like.shape
    return like.new_empty(B, T, H, E).transpose(1, 2)


_attention.register_autograd(
    lambda ctx, dy, _: (*_attention_backward(dy, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    y: Tensor = _attention(q, k, v, attn_mask)[0]
    return y
