"""The operations of a training step by themselves, at the sizes of gpt2-1.5b and llama-8b.

Each is replayed in a CUDA graph, so that no launch is in its time, on inputs that a cache does not
hold. A row is printed and written as soon as it is measured; one that fails does not stop others.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.cells import append_line, some_of
from bench.gpu.facts import HEADLINE, facts, output
from fp8stack import numerics
from fp8stack.analysis.benchmark.timing import wait_for
from fp8stack.common.formats import Quantizer
from fp8stack.layers.kernels import fused_casts, variants
from fp8stack.layers.kernels.fused_casts import Product, cast_blocks, cast_product, product_amax
from fp8stack.layers.kernels.scaled_gemm import Scaled, ScaleLayout, scaled_gemm
from fp8stack.layers.kernels.weight_casts import KeptWeights
from fp8stack.model.config import GPTConfig, load_config, padded_vocabulary
from fp8stack.model.loss import head_loss
from fp8stack.precision import probe

Call = Callable[[], Any]
CACHE_BYTES = 128 * 2**20  # inputs take turns beyond this: GPUs of today have 50 to 130 MB of cache
REPLAYS, CALLS = 10, 20
FLOAT32, BF16 = torch.float32, torch.bfloat16
BLOCKS = {
    "block": Quantizer(format="e4m3", block=(1, 128), scale="float32"),
    "mxfp8": Quantizer(format="e4m3", block=(1, 32), scale="e8m0"),
}


class Case(NamedTuple):
    """An operation.

    Attributes:
        name: what it computes.
        size: of its operands, in words.
        make: makes inputs, and returns the call.
        moved: the fewest bytes that it reads and writes.
        flops: the operations of its GEMMs.
    """

    name: str
    size: str
    make: Callable[[], Call]
    moved: float
    flops: float = 0.0


class Shapes(NamedTuple):
    """A model, the rows of its activations, and the device."""

    model: str
    config: GPTConfig
    rows: int
    device: str

    def random(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        """A matrix of random normal values."""
        return torch.randn(shape, device=self.device).to(dtype)

    def linears(self) -> Iterator[tuple[str, int, int]]:
        """The linears of a block, and the head with padded vocabularies: name, in, out."""
        for name, (inputs, outputs) in self.config.linear_shapes().items():
            if name.startswith("blocks.0."):
                yield name.removeprefix("blocks.0."), inputs, outputs
        sizes = {padded_vocabulary(self.config, multiple) for multiple in (1, 8, 64)}
        for vocabulary in sorted(sizes):
            yield "lm_head", self.config.width, vocabulary


def machine(shapes: Shapes) -> Iterator[Case]:
    """A copy, and a square GEMM in bf16 and FP8."""
    size = 64 if shapes.device == "cpu" else 8192
    for name, call, moved, flops in (
        ("copy", _copy, 4.0, 0.0), ("bf16 GEMM", _bf16_gemm, 6.0, 2.0), ("FP8 GEMM", _fp8_gemm, 4.0, 2.0),
    ):  # fmt: skip
        make = partial(call, shapes, size, size, size)
        yield Case(name, f"{size}", make, moved * size**2, flops * size**3)


def _copy(shapes: Shapes, rows: int, columns: int, _: int) -> Call:
    x = shapes.random(rows, columns)
    return partial(torch.empty_like(x).copy_, x)


def _bf16_gemm(
    shapes: Shapes, m: int, k: int, n: int, out_dtype: torch.dtype = BF16, kept: str = "nt"
) -> Call:
    """[m, k] x [k, n]; `kept` says which operands are transposed in memory."""
    a = shapes.random(k, m).t() if kept[0] == "t" else shapes.random(m, k)
    b = shapes.random(n, k).t() if kept[1] == "t" else shapes.random(k, n)
    if out_dtype == FLOAT32 and shapes.device != "cpu":
        return partial(torch.mm, a, b, out_dtype=out_dtype)
    return partial(torch.mm, a, b)


def _fp8_gemm(
    shapes: Shapes, m: int, k: int, n: int, out_dtype: torch.dtype = BF16, fast: bool = True
) -> Call:
    one = torch.ones((), device=shapes.device)
    a, b = (
        Scaled(shapes.random(*size).to(torch.float8_e4m3fn), one, ScaleLayout.PER_TENSOR)
        for size in ((m, k), (n, k))
    )
    return partial(scaled_gemm, a, b, out_dtype, fast_accumulation=fast)


def gemms(shapes: Shapes) -> Iterator[Case]:
    """The three GEMMs of each linear, in bf16 and FP8, weight gradients in float32 as well."""
    rows = shapes.rows
    for name, inputs, outputs in shapes.linears():
        flops = 2.0 * rows * inputs * outputs
        for kind, m, k, n, kept in (
            ("forward", rows, inputs, outputs, "nt"),
            ("dgrad", rows, outputs, inputs, "nn"),
            ("wgrad", outputs, rows, inputs, "tn"),
        ):
            size, moved = f"{m} x {k} x {n}", float(m * k + k * n)
            for dtype, bytes_out in ((BF16, 2), (FLOAT32, 4)):
                if dtype == FLOAT32 and kind != "wgrad":
                    continue
                suffix = f"{name} {kind}{' in float32' if dtype == FLOAT32 else ''}"
                written = bytes_out * m * n
                make = partial(_bf16_gemm, shapes, m, k, n, dtype, kept)
                yield Case(f"bf16 {suffix}", size, make, 2 * moved + written, flops)
                if name != "lm_head" or not any(number % 16 for number in (m, k, n)):
                    make = partial(_fp8_gemm, shapes, m, k, n, dtype, kind == "forward")
                    yield Case(f"FP8 {suffix}", size, make, moved + written, flops)


def products(shapes: Shapes) -> Iterator[tuple[str, Callable[[], Product], str, bool]]:
    """What is cast in a block: name, the product, the format, and whether its sums are needed."""
    config, rows = shapes.config, shapes.rows
    name, hidden = config.activation, config.hidden
    up = hidden * (2 if config.gated else 1)
    random = shapes.random
    yield "x", lambda: Product("cast", random(rows, config.width)), "e4m3", False
    yield "dy", lambda: Product("cast", random(rows, config.width)), "e5m2", config.bias
    yield name, lambda: Product(name, random(rows, up)), "e4m3", False
    backward = lambda: Product(name, random(rows, up), random(rows, hidden))  # noqa: E731
    yield f"{name} backward", backward, "e5m2", config.bias


def casts(shapes: Shapes) -> Iterator[Case]:
    """Casts of activations, gradients and weights, with transposes; and the transpose alone."""
    one = torch.ones((), device=shapes.device)
    for name, make, format, sums in products(shapes):
        x = make()
        size = " x ".join(map(str, x.shape))
        read = 2.0 * (x.x.numel() + (0 if x.dy is None else x.dy.numel()))
        written = 2.0 * x.shape[0] * x.shape[1]
        options: dict[str, Any] = {"across": True, "sums": sums}

        def given(make: Any = make, format: str = format, options: Any = options) -> Call:
            return partial(cast_product, make(), one, format, record=True, **options)

        yield Case(f"{name}: cast, transpose, amax", size, given, read + written)
        yield Case(f"{name}: amax", size, lambda make=make: partial(product_amax, make()), read)
        for kind, quantizer in BLOCKS.items():

            def blocks(make: Any = make, of: Quantizer = quantizer, more: Any = options) -> Call:
                return partial(cast_blocks, make(), of, **more)

            yield Case(f"{name}: cast in blocks, {kind}", size, blocks, read + written)
    for columns in (shapes.config.width, shapes.config.hidden):
        size, bytes = f"{shapes.rows} x {columns}", 2.0 * shapes.rows * columns
        codes = partial(torch.zeros, shapes.rows, columns, dtype=torch.uint8, device=shapes.device)
        make_transpose = lambda codes=codes: partial(variants.transpose_bytes, codes())  # noqa: E731
        yield Case("transpose of bytes", size, make_transpose, bytes)
    weights = [(outputs, inputs) for name, inputs, outputs in shapes.linears() if name != "lm_head"]
    count = sum(rows * columns for rows, columns in weights)

    def in_fp8(scales: bool) -> Call:
        kept = KeptWeights([shapes.random(*w, dtype=FLOAT32) for w in weights], Quantizer())
        given = torch.ones(len(weights), device=shapes.device)
        return partial(kept.cast, given, torch.zeros_like(given)) if scales else kept.cast

    def in_bf16() -> Call:
        masters = [shapes.random(*w, dtype=FLOAT32) for w in weights]
        return partial(torch._foreach_copy_, [w.bfloat16() for w in masters], masters)

    if shapes.device != "cpu":  # they are launched on a GPU's stream
        yield Case(
            "a block's weights: FP8, delayed", f"{count}", partial(in_fp8, True), 6.0 * count
        )
        yield Case(
            "a block's weights: FP8, current", f"{count}", partial(in_fp8, False), 10.0 * count
        )
    yield Case("a block's weights: bf16", f"{count}", in_bf16, 6.0 * count)


def attention(shapes: Shapes) -> Iterator[Case]:
    """Attention by each of torch's kernels, forward and with its backward pass."""
    config, E = shapes.config, shapes.config.head_dim
    T = min(shapes.rows, config.context)
    B, H, G = shapes.rows // T, config.heads, config.query_groups
    flops = 2.0 * B * H * T * T * E  # causal: half of two products
    moved = 2.0 * B * T * E * (2 * H + 2 * G)
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        for backward in (False, True):
            make = partial(_attention, shapes, (B, H, G, T, E), backend, backward)
            name = f"{backend.lower()}, forward{' and backward' if backward else ''}"
            times = 3.5 if backward else 1.0
            yield Case(name, f"{B} x {H} ({G}) x {T} x {E}", make, times * moved, times * flops)


def _attention(shapes: Shapes, size: tuple[int, ...], backend: str, backward: bool) -> Call:
    B, H, G, T, E = size
    q, k, v = (shapes.random(B, T, h, E).transpose(1, 2).requires_grad_() for h in (H, G, G))
    dy = shapes.random(B, T, H, E).transpose(1, 2)
    kernel = SDPBackend.MATH if shapes.device == "cpu" else getattr(SDPBackend, backend)

    def call() -> None:
        with sdpa_kernel(kernel):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != G)
        if backward:
            torch.autograd.grad(y, (q, k, v), dy)

    return call


def optimizer(shapes: Shapes) -> Iterator[Case]:
    """AdamW, the gradients' norm and accumulation, of the parameters of a block."""
    blocks = {n: s for n, s in shapes.config.parameter_shapes().items() if n.startswith("blocks.0")}
    count = sum(torch.Size(size).numel() for size in blocks.values())

    def make(name: str) -> Call:
        weights = [shapes.random(*size, dtype=FLOAT32).requires_grad_() for size in blocks.values()]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        gradients = [weight.grad for weight in weights]
        if name == "AdamW":
            on_gpu = shapes.device != "cpu"
            return torch.optim.AdamW(weights, fused=True, capturable=on_gpu).step
        if name == "norm":
            return partial(torch.nn.utils.get_total_norm, gradients)
        return partial(torch._foreach_add_, gradients, [torch.randn_like(w) for w in weights])

    for name, bytes in (("AdamW", 28), ("norm", 4), ("accumulation", 12)):
        yield Case(name, f"{count}", partial(make, name), float(bytes * count))


def elementwise(shapes: Shapes) -> Iterator[Case]:
    """Compiled code between GEMMs, with its backward pass: norms, the sums of bias gradients, GELU,
    the loss; also at the next width that 512 divides. The embedding is not compiled."""
    rows, width = shapes.rows, shapes.config.width
    compiled = partial(torch.compile, backend="eager" if shapes.device == "cpu" else "inductor")

    def trained(function: Callable[..., Tensor], *sizes: tuple[int, ...]) -> Call:
        inputs = [shapes.random(*size).requires_grad_() for size in sizes]
        run = compiled(function, dynamic=False)
        dy = torch.ones_like(run(*inputs))
        return lambda: torch.autograd.grad(run(*inputs), inputs, dy)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float()).bfloat16()

    for columns in sorted({width, -(-width // 512) * 512, shapes.config.hidden}):
        size, full, line = f"{rows} x {columns}", (rows, columns), (columns,)
        moved = 2.0 * rows * columns
        make = partial(trained, norm, full, line, line)
        yield Case("layer norm, forward and backward", size, make, 5 * moved)
        make = partial(trained, lambda x, b: F.gelu(x + b, approximate="tanh"), full, line)
        yield Case("bias and GELU, forward and backward", size, make, 5 * moved)
        sums = lambda full=full: partial(  # noqa: E731
            compiled(lambda x: x.sum(0, dtype=FLOAT32), dynamic=False), shapes.random(*full)
        )
        yield Case("sums over rows", size, sums, moved)
    vocabulary = padded_vocabulary(shapes.config, 8)
    targets = torch.arange(rows, device=shapes.device) % shapes.config.vocabulary

    def loss(x: Tensor) -> Tensor:
        return head_loss(torch.nn.Identity(), x, targets, shapes.config.vocabulary)

    moved = 2.0 * rows * vocabulary
    make = partial(trained, loss, (rows, vocabulary))
    yield Case("loss of logits, forward and backward", f"{rows} x {vocabulary}", make, 4 * moved)

    def embedding() -> Call:
        table = shapes.random(vocabulary, width, dtype=FLOAT32).requires_grad_()
        dy = shapes.random(rows, width, dtype=FLOAT32)
        return lambda: torch.autograd.grad(F.embedding(targets, table), table, dy)

    moved = 4.0 * (4 * rows + vocabulary) * width
    yield Case("embedding, forward and backward", f"{vocabulary} x {width}", embedding, moved)


def tiles(shapes: Shapes) -> Iterator[Case]:
    """Our Triton kernels for casts, in each tile and number of warps. On a CPU Triton interprets
    them. Each call checks its bytes with the present tile's before it is timed."""
    sizes = [(128, 128, 16), *((r, c, w) for r in (128, 64) for c in (128, 64) for w in (4, 8, 16))]
    for name, make, format, sums in products(shapes):
        product = make()
        moved = 2.0 * (product.x.numel() + (0 if product.dy is None else product.dy.numel()))
        moved += 2.0 * product.shape[0] * product.shape[1]
        size = " x ".join(map(str, product.shape))
        for tile in dict.fromkeys(sizes if shapes.device != "cpu" else sizes[:3]):
            call = partial(_tiled, make, format, sums, tile)
            yield Case(f"{name}, tile {tile[0]} x {tile[1]}, {tile[2]} warps", size, call, moved)
    rows, columns = shapes.rows, shapes.config.hidden
    for side in (128, 64):
        for warps in (4, 8, 16):
            call = partial(_transposed, shapes, rows, columns, side, warps)
            name = f"transpose of bytes, tile {side} x {side}, {warps} warps"
            yield Case(name, f"{rows} x {columns}", call, 2.0 * rows * columns)
    for high, wide, warps in ((128, 64, 4), (128, 64, 8), (64, 64, 4), (64, 128, 8), (128, 128, 8)):
        call = partial(_weights, shapes, columns, shapes.config.width, high, wide, warps)
        name = f"weight, tile {high} x {wide}, {warps} warps"
        yield Case(
            name, f"{columns} x {shapes.config.width}", call, 6.0 * columns * shapes.config.width
        )


def _tiled(
    make: Callable[[], Product], format: str, sums: bool, tile: tuple[int, int, int]
) -> Call:
    from fp8stack.layers.kernels import triton_kernels

    (high, wide, warps), product = tile, make()
    x, device = product.x, product.x.device
    rows, width = len(x), fused_casts._width(product)
    columns, scale = product.shape[1], torch.ones((), device=device)
    how = fused_casts.product_variant(
        product, Quantizer(format=format), "given", variants.converts_exactly(device),
        across=True, record=True, sums=sums, rows=high, columns=wide,
    )  # fmt: skip
    down, across = -(-rows // high), -(-width // wide)
    data, transposed = x.new_empty((2, rows * columns), dtype=torch.uint8)
    amaxes, total = x.new_empty(down * across).float(), x.new_empty(down, columns).float()
    options = variants.OPTIONS | {"num_warps": warps}
    inputs = x, x if product.dy is None else product.dy, scale, data, transposed
    launch = partial(
        triton_kernels.cast_product[(down * across,)], *inputs, x, x, amaxes, total, rows, width,
        HOW=how, **options,
    )  # fmt: skip
    launch()
    expected = cast_product(product, scale, format, across=True, record=True, sums=sums)
    assert expected.transposed is not None
    pairs = (data, expected.data), (transposed, expected.transposed)
    for codes, reference in pairs:
        apart = (codes.view(-1) != reference.view(torch.uint8).view(-1)).sum()
        # exp and erf of torch, for a CPU, differ from Triton's in the last bit
        assert int(apart) <= (0 if device.type == "cuda" else codes.numel() // 100), "wrong bytes"
    assert expected.amax is not None
    assert torch.allclose(amaxes.max(), expected.amax, rtol=0.01)
    return launch


def _transposed(shapes: Shapes, rows: int, columns: int, side: int, warps: int) -> Call:
    from fp8stack.layers.kernels import triton_kernels

    codes = torch.randint(256, (rows, columns), dtype=torch.uint8, device=shapes.device)
    result = codes.new_empty(columns, rows)
    grid = (-(-rows // side) * -(-columns // side),)
    options = variants.OPTIONS | {"num_warps": warps, "SIZE": side}
    launch = partial(triton_kernels.transpose_bytes[grid], codes, result, rows, columns, **options)
    launch()
    assert torch.equal(result, codes.t()), "wrong bytes"
    return launch


def _weights(shapes: Shapes, rows: int, columns: int, high: int, wide: int, warps: int) -> Call:
    from fp8stack.layers.kernels import triton_kernels

    weight = shapes.random(rows, columns, dtype=FLOAT32)
    data, transposed = weight.new_empty((2, rows * columns), dtype=torch.uint8)
    inverse, scales, amaxes = weight.new_ones((3, 1))
    addresses = [t.data_ptr() for t in (weight, data, transposed, inverse, inverse)]
    table = torch.tensor([[*addresses, rows, columns, 0, 0]]).to(shapes.device)
    owners = table.new_zeros(-(-rows // high) * -(-columns // wide), dtype=torch.int32)
    exact = variants.converts_exactly(weight.device)
    how = variants.variant(
        Quantizer(), "given", FLOAT32, exact, record=True, rows=high, columns=wide
    )
    launch = partial(
        triton_kernels.cast_weights[(len(owners),)], table, owners, scales, amaxes,
        HOW=how, ALIGNED=True, SPACING=1, **(variants.OPTIONS | {"num_warps": warps}),
    )  # fmt: skip
    launch()
    expected = numerics.cast_to_fp8(weight, scales[0], "e4m3").view(torch.uint8)
    assert torch.equal(data, expected.view(-1)), "wrong bytes"
    assert torch.equal(transposed, expected.t().reshape(-1)), "wrong bytes"
    held = weight, data, transposed, inverse  # the table has their addresses alone
    return lambda: (launch(), held)


GROUPS: dict[str, Callable[[Shapes], Iterator[Case]]] = {
    "machine": machine,
    "casts": casts,
    "gemms": gemms,
    "attention": attention,
    "optimizer": optimizer,
    "elementwise": elementwise,
    "tiles": tiles,
}


def times_us(calls: list[Call], device: str) -> tuple[list[float], bool]:
    """Microseconds of a call, in turns of all `calls`, and whether a graph replayed them."""
    for call in calls:
        call()
    if device == "cpu":
        return [_clocked_us(calls) for _ in range(2)], False
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    replay: Call = graph.replay
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for call in calls:
                call()
    except RuntimeError as error:
        print(f"no graph: {str(error).partition(chr(10))[0]}", flush=True)
        torch.cuda.synchronize()
        replay = lambda: [call() for call in calls]  # noqa: E731
    replayed = replay == graph.replay
    samples = []
    for _ in range(REPLAYS + 1):  # the first is a warm-up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(1000 * begin.elapsed_time(end) / len(calls))
    return samples[1:], replayed


def _clocked_us(calls: list[Call]) -> float:
    begin = time.perf_counter()
    for call in calls:
        call()
    return 1e6 * (time.perf_counter() - begin) / len(calls)


def measured(case: Case, device: str) -> dict[str, Any]:
    """The row of a case. Inputs take turns where they would fit in a cache."""
    sets = 1 if device == "cpu" else max(1, min(8, int(CACHE_BYTES / case.moved) + 1))
    calls = [case.make() for _ in range(sets)]
    if device != "cpu":
        calls *= -(-CALLS // sets)
    samples, replayed = times_us(calls, device)
    us = statistics.median(samples)
    row = {"us": round(us, 3), "low_us": round(min(samples), 3), "high_us": round(max(samples), 3)}
    row |= {"tb_s": round(case.moved / us / 1e6, 4), "graph": replayed}
    return row | ({"tflop_s": round(case.flops / us / 1e6, 3)} if case.flops else {})


def launches(device: str) -> Iterator[dict[str, Any]]:
    """Launches of a kernel that does nothing much: by torch, and in a graph; and Python's speed."""
    x, count = torch.ones((), device=device), 1000
    calls: list[Call] = [partial(x.add_, 1.0)] * count
    wait_for(device)
    host = statistics.median(_clocked_us(calls) for _ in range(5))
    yield {"name": "a launch, host", "us": round(host, 3)}
    wait_for(device)
    if device != "cpu":
        samples, _ = times_us(calls, device)
        yield {"name": "a launch in a graph", "us": round(statistics.median(samples), 3)}
    python: list[Call] = [lambda: None] * count
    us = statistics.median(_clocked_us(python) for _ in range(20))
    yield {"name": "a call in Python", "us": round(us, 4)}


def surroundings() -> dict[str, Any]:
    """The machine: kernel, virtualization, processor, and the GPU's clocks and limits."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if "model name" in line]
    query = "name,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,memory.total"
    return {
        "kernel": f"{platform.system()} {platform.release()} {platform.version()}",
        "virtual": output("systemd-detect-virt") or ("hypervisor" in info and "a hypervisor"),
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "gpu": output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
    }


def words(row: dict[str, Any]) -> str:
    """A row in words."""
    text = f"{row['name']} {row.get('size', '')}: "
    if "failed" in row:
        return f"{text}failed: {row['failed']}"
    text += f"{row['us']:.2f} us"
    for key, unit in (("tb_s", "TB/s"), ("tflop_s", "TFLOP/s")):
        text += f", {row[key]:.4g} {unit}" if key in row else ""
    return text if row.get("graph", True) else f"{text}, without a graph"


def headlines(group: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of a group in the visit's summary: all rows of the machine; of each kernel the
    present tile and the best; else the median rate, and the slowest rows."""
    timed = [row for row in rows if "us" in row]
    yield f"{group}: {len(timed)} of {len(rows)} measured"
    if group == "machine":
        yield from map(words, timed)
    elif group == "tiles":
        for kernel in dict.fromkeys(
            (row["name"].partition(", tile")[0], row["size"]) for row in timed
        ):
            same = [r for r in timed if (r["name"].partition(", tile")[0], r["size"]) == kernel]
            best = min(same, key=lambda row: row["us"])
            yield f"{words(best)} (the first: {same[0]['us']:.2f} us)"
    elif timed:
        key = "tflop_s" if "tflop_s" in timed[0] else "tb_s"
        ordered = sorted((row for row in timed if key in row), key=lambda row: row[key])
        yield f"{group}: median {ordered[len(ordered) // 2][key]:.4g} {key}; the slowest:"
        yield from map(words, ordered[:3])


def main() -> int:
    """Measure, print, and append to a file. Returns 1 if something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.micro", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="a file, one JSON object per line")
    add("--groups", type=some_of("group", GROUPS), default=[*GROUPS], metavar="A,B",
        help=f"of {','.join(GROUPS)} (default: all)")  # fmt: skip
    add("--seconds", type=float, default=1e9, help="no operation begins later (default: any may)")
    add("--dry-run", action="store_true", help="tiny sizes on a CPU, without graphs")
    arguments = parser.parse_args()
    if arguments.dry_run and "tiles" in arguments.groups and not os.environ.get("TRITON_INTERPRET"):
        os.environ["TRITON_INTERPRET"] = "1"  # it is read where Triton is imported
        os.execv(sys.executable, [sys.executable, "-m", "bench.gpu.micro", *sys.argv[1:]])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    hardware = probe("cpu" if arguments.dry_run else "cuda")
    device, end = hardware.device, time.monotonic() + arguments.seconds
    append_line(arguments.out, {"facts": facts(hardware), "machine": surroundings()})
    print(f"{HEADLINE}{hardware}; {surroundings()}", flush=True)
    models = [
        Shapes(n, load_config(n), rows, device)
        for n, rows in (("gpt2-1.5b", 4096), ("llama-8b", 8192))
    ]
    failed = False
    for group in arguments.groups:
        rows: list[dict[str, Any]] = []
        late = 0
        if group == "machine":
            rows += [row | {"group": group} for row in launches(device)]
        for shapes in models[:1] if group == "machine" else models:
            for case in GROUPS[group](tiny(shapes) if arguments.dry_run else shapes):
                if time.monotonic() > end:
                    late += 1
                    continue
                row = {"group": group, "model": shapes.model, "name": case.name, "size": case.size}
                try:
                    row |= measured(case, device)
                except Exception as error:  # of any kind: the next is measured all the same
                    failed = True
                    row["failed"] = (
                        f"{type(error).__name__}: {str(error).partition(chr(10))[0][:150]}"
                    )
                rows.append(row)
                append_line(arguments.out, row)
                print(words(row), flush=True)
        for line in headlines(group, rows):
            print(
                f"{HEADLINE}{line}{f'; {late} left out for want of time' if late else ''}",
                flush=True,
            )
            late = 0
    return int(failed)


def tiny(shapes: Shapes) -> Shapes:
    """The same operations at sizes for a CPU."""
    sizes = {"vocabulary": 90, "context": 32, "layers": 1, "width": 32, "heads": 2, "mlp_width": 64}
    sizes["kv_heads"] = 2 if shapes.config.kv_heads is None else 1
    return shapes._replace(config=shapes.config.model_copy(update=sizes), rows=64)


if __name__ == "__main__":
    raise SystemExit(main())
