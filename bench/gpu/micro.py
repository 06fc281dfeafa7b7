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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.cells import append_line, some_of
from bench.gpu.facts import HEADLINE, facts, output
from fp8stack.analysis.benchmark.timing import wait_for
from fp8stack.common.formats import Quantizer
from fp8stack.layers.kernels import fused_casts, variants
from fp8stack.layers.kernels.fused_casts import FusedInput, cast_blocks, cast_product, product_amax
from fp8stack.layers.kernels.scaled_gemm import Scaled, ScaleLayout, scaled_gemm
from fp8stack.layers.kernels.weight_casts import BatchedCast
from fp8stack.model.config import GPTConfig, load_config, padded_vocabulary
from fp8stack.model.loss import head_loss
from fp8stack.numerics import cast_to_fp8
from fp8stack.precision import probe

Call = Callable[[], Any]
Row = dict[str, Any]
ROWS = {"gpt2-1.5b": 4096, "llama-8b": 8192}  # tokens of a micro-batch
CACHE_BYTES = 128 * 2**20  # inputs take turns beyond this: GPUs of today have 50 to 130 MB of cache
REPLAYS, CALLS, LAUNCHES = 10, 24, 1000
RATES = 4e6, 8e8  # bytes and operations in a microsecond, about the most that a GPU of today has
FLOAT32, BF16 = torch.float32, torch.bfloat16
BLOCKS = Quantizer(format="e4m3", block=(1, 128), scale="float32")


class Case(NamedTuple):
    """An operation."""

    name: str
    size: tuple[int, ...]
    make: Callable[[], Call]  # makes inputs, and returns the call
    moved: float  # the fewest bytes that it reads and writes
    flops: float = 0.0  # of its GEMMs


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
        """The linears of a block, and the head by its vocabulary's padding: name, in, out."""
        for name, (inputs, outputs) in self.config.linear_shapes().items():
            if name.startswith("blocks.0."):
                yield name.removeprefix("blocks.0."), inputs, outputs
        sizes = {padded_vocabulary(self.config, multiple) for multiple in (1, 8, 64)}
        for vocabulary in sorted(sizes):
            yield "lm_head", self.config.width, vocabulary


def machine(shapes: Shapes) -> Iterator[Case]:
    """A copy, and a square GEMM in bf16 and FP8."""
    n = 64 if shapes.device == "cpu" else 8192
    x = shapes.random(n, n)
    yield Case("copy", (n, n), lambda: partial(torch.empty_like(x).copy_, x), 4.0 * n**2)
    for name, make, bytes in (("bf16", bf16_gemm, 6.0), ("FP8", fp8_gemm, 4.0)):
        call = partial(make, shapes, n, n, n, BF16, "forward")
        yield Case(f"{name} GEMM", (n, n, n), call, bytes * n**2, 2.0 * n**3)


def bf16_gemm(shapes: Shapes, m: int, k: int, n: int, dtype: torch.dtype, kind: str) -> Call:
    """[m, k] x [k, n], with the operands in memory as forward, dgrad or wgrad have them."""
    a = shapes.random(k, m).t() if kind == "wgrad" else shapes.random(m, k)
    b = shapes.random(n, k).t() if kind == "forward" else shapes.random(k, n)
    on_gpu_alone = {"out_dtype": dtype} if dtype == FLOAT32 and shapes.device != "cpu" else {}
    return partial(torch.mm, a, b, **on_gpu_alone)


def fp8_gemm(shapes: Shapes, m: int, k: int, n: int, dtype: torch.dtype, kind: str) -> Call:
    """[m, k] x [k, n] of operands with a scale per tensor, accumulated fast in forward."""
    scale = torch.ones((), device=shapes.device)
    a, b = (
        Scaled(shapes.random(rows, k).to(torch.float8_e4m3fn), scale, ScaleLayout.PER_TENSOR)
        for rows in (m, n)
    )
    return partial(scaled_gemm, a, b, dtype, fast_accumulation=kind == "forward")


def gemms(shapes: Shapes) -> Iterator[Case]:
    """The three GEMMs of each linear, in bf16 and FP8, weight gradients in float32 as well."""
    rows = shapes.rows
    for name, inputs, outputs in shapes.linears():
        for kind, m, k, n in (
            ("forward", rows, inputs, outputs),
            ("dgrad", rows, outputs, inputs),
            ("wgrad", outputs, rows, inputs),
        ):
            for dtype in (BF16, FLOAT32) if kind == "wgrad" else (BF16,):
                written, suffix = dtype.itemsize * m * n, f"{name} {kind}, {dtype.itemsize} bytes"
                for precision, make, bytes in (("bf16", bf16_gemm, 2), ("FP8", fp8_gemm, 1)):
                    if precision == "bf16" or not any(size % 16 for size in (m, k, n)):
                        moved = float(bytes * (m * k + k * n) + written)
                        call = partial(make, shapes, m, k, n, dtype, kind)
                        yield Case(f"{precision} {suffix}", (m, k, n), call, moved, 2.0 * m * k * n)


def products(shapes: Shapes) -> Iterator[tuple[str, Callable[[], FusedInput], str, bool, float]]:
    """The products that are cast in a block: name, the product, its format, whether its sums are
    needed, and the bytes of a cast with its transpose."""
    config, rows, random = shapes.config, shapes.rows, shapes.random
    width, hidden, name = config.width, config.hidden, config.activation
    up = hidden * (2 if config.gated else 1)
    yield "x", lambda: FusedInput("cast", random(rows, width)), "e4m3", False, 4.0 * rows * width
    dy = lambda: FusedInput("cast", random(rows, width))  # noqa: E731
    yield "dy", dy, "e5m2", config.bias, 4.0 * rows * width
    moved = 2.0 * rows * (up + hidden)
    yield name, lambda: FusedInput(name, random(rows, up)), "e4m3", False, moved
    backward = lambda: FusedInput(name, random(rows, up), random(rows, hidden))  # noqa: E731
    yield f"{name} backward", backward, "e5m2", config.bias, 2.0 * rows * (2 * up + hidden)


def casts(shapes: Shapes) -> Iterator[Case]:
    """Casts of activations, gradients and weights, with their transposes."""
    scale = torch.ones((), device=shapes.device)
    for name, make, format, sums, moved in products(shapes):
        size = make().shape
        options: Row = {"columnwise": True, "sums": sums}
        per_tensor = partial(cast_product, scale=scale, format=format, record=True, **options)
        blocks = partial(cast_blocks, quantizer=BLOCKS, **options)
        for kind, function, bytes in (
            ("cast, transpose, amax", per_tensor, moved),
            ("cast in blocks", blocks, moved),
            ("amax", product_amax, moved - 2.0 * size[0] * size[1]),
        ):
            call = lambda make=make, function=function: partial(function, make())  # noqa: E731
            yield Case(f"{name}: {kind}", size, call, bytes)
    weights = [(outputs, inputs) for name, inputs, outputs in shapes.linears() if name != "lm_head"]
    count = sum(rows * columns for rows, columns in weights)

    def weight_cast(kind: str) -> Call:
        masters = [shapes.random(*size, dtype=FLOAT32) for size in weights]
        if kind == "bf16":
            return partial(torch._foreach_copy_, [w.bfloat16() for w in masters], masters)
        copies, scales = BatchedCast(masters, Quantizer()), torch.ones(len(weights)).cuda()
        arguments = (scales, torch.zeros_like(scales)) if kind == "delayed" else ()
        return holding(masters, partial(copies.cast, *arguments))

    # Kernels for weights are launched on a GPU's stream.
    for kind, bytes in (("bf16", 6.0), ("delayed", 6.0), ("current", 10.0)):
        if kind == "bf16" or shapes.device != "cpu":
            make_cast = partial(weight_cast, kind)
            yield Case(f"a block's weights: {kind}", (count,), make_cast, bytes * count)


def attention(shapes: Shapes) -> Iterator[Case]:
    """Attention by each of torch's kernels, forward and with its backward pass."""
    config, E = shapes.config, shapes.config.head_dim
    T = min(shapes.rows, config.context)
    B, H, G = shapes.rows // T, config.heads, config.query_groups

    def make(backend: str, backward: bool) -> Call:
        q, k, v = (shapes.random(B, T, n, E).transpose(1, 2).requires_grad_() for n in (H, G, G))
        dy = torch.randn_like(q)
        kernel = SDPBackend.MATH if shapes.device == "cpu" else getattr(SDPBackend, backend)

        def call() -> None:
            with sdpa_kernel(kernel):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != G)
            if backward:
                torch.autograd.grad(y, (q, k, v), dy)

        return call

    flops, moved = 2.0 * B * H * T * T * E, 4.0 * B * T * E * (H + G)  # causal: half of two GEMMs
    backends = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
    for backend in backends if H == G else backends[:2]:  # the last takes no groups
        for backward in (False, True):
            name = f"{backend.lower()}, forward{' and backward' if backward else ''}"
            times = 3.5 if backward else 1.0
            call = partial(make, backend, backward)
            yield Case(name, (B, H, G, T, E), call, times * moved, times * flops)


def optimizer(shapes: Shapes) -> Iterator[Case]:
    """AdamW, the gradients' norm and accumulation, of the parameters of a block."""
    shapes_of = shapes.config.parameter_shapes()
    sizes = [size for name, size in shapes_of.items() if name.startswith("blocks.0")]
    count = sum(torch.Size(size).numel() for size in sizes)

    def make(name: str) -> Call:
        weights = [shapes.random(*size, dtype=FLOAT32).requires_grad_() for size in sizes]
        gradients = [torch.randn_like(weight) for weight in weights]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        if name == "AdamW":
            on_gpu = shapes.device != "cpu"
            return torch.optim.AdamW(weights, fused=True, capturable=on_gpu).step
        if name == "norm":
            return partial(torch.nn.utils.get_total_norm, gradients)
        return partial(torch._foreach_add_, gradients, [torch.randn_like(w) for w in weights])

    for name, bytes in (("AdamW", 28.0), ("norm", 4.0), ("accumulation", 12.0)):
        yield Case(name, (count,), partial(make, name), bytes * count)


def elementwise(shapes: Shapes) -> Iterator[Case]:
    """Compiled code between GEMMs, with its backward pass: norms, GELU, the sums of bias gradients,
    the loss; also at the next width that 512 divides. The embedding is not compiled."""
    rows, config = shapes.rows, shapes.config
    compiler = "eager" if shapes.device == "cpu" else "inductor"

    def trained(function: Callable[..., Tensor], *sizes: tuple[int, ...], run: Any = None) -> Call:
        inputs = [shapes.random(*size).requires_grad_() for size in sizes]
        run = run or torch.compile(function, backend=compiler, dynamic=False)
        dy = torch.ones_like(run(*inputs))
        return lambda: torch.autograd.grad(run(*inputs), inputs, dy)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float()).bfloat16()

    def gelu(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate="tanh")

    def sums(size: tuple[int, ...]) -> Call:
        total = torch.compile(lambda x: x.sum(0, dtype=FLOAT32), backend=compiler, dynamic=False)
        return partial(total, shapes.random(*size))

    for columns in sorted({config.width, -(-config.width // 512) * 512, config.hidden}):
        size, line, moved = (rows, columns), (columns,), 2.0 * rows * columns
        make = partial(trained, norm, size, line, line)
        yield Case("layer norm, forward and backward", size, make, 5 * moved)
        make = partial(trained, gelu, size, line)
        yield Case("bias and GELU, forward and backward", size, make, 5 * moved)
        yield Case("sums over rows", size, partial(sums, size), moved)
    vocabulary = padded_vocabulary(config, 8)
    targets = torch.arange(rows, device=shapes.device) % config.vocabulary

    def loss(logits: Tensor) -> Tensor:
        return head_loss(torch.nn.Identity(), logits, targets, config.vocabulary)

    size, moved = (rows, vocabulary), 8.0 * rows * vocabulary
    yield Case("loss of logits, forward and backward", size, partial(trained, loss, size), moved)
    size, moved = (vocabulary, config.width), 2.0 * (4 * rows + 2 * vocabulary) * config.width
    embedding = partial(F.embedding, targets)
    make = partial(trained, embedding, size, run=embedding)
    yield Case("embedding, forward and backward", size, make, moved)


def tiles(shapes: Shapes) -> Iterator[Case]:
    """Our Triton kernels for casts to one scale per tensor, and the transpose, in each tile and
    number of warps, the present ones first. Before a tile is timed, its bytes are compared with the
    present kernel's. On a CPU Triton interprets them."""
    # More than 64 elements to a thread do not fit its registers.
    sides = [(64, 64), (64, 128), (128, 64), (128, 128)]
    grid = [
        (*side, warps) for side in sides for warps in (4, 8, 16) if (side, warps) != (sides[-1], 4)
    ]
    grid = grid if shapes.device != "cpu" else grid[::5]
    for name, make, format, sums, moved in products(shapes):
        size = make().shape
        for tile in grid:
            call = partial(tiled_product, make, format, sums, tile)
            yield Case(f"{name}, tile {tile}", size, call, moved)
    rows, columns, width = shapes.rows, shapes.config.hidden, shapes.config.width
    codes = torch.randint(256, (rows, columns), dtype=torch.uint8, device=shapes.device)
    for tile in sorted((t for t in grid if t[0] == t[1]), key=lambda tile: tile != (128, 128, 8)):
        call = partial(tiled_transpose, codes, tile)
        yield Case(f"transpose of bytes, tile {tile}", codes.shape, call, 2.0 * codes.numel())
    for tile in grid:
        call = partial(tiled_weight, shapes.random(columns, width, dtype=FLOAT32), tile)
        yield Case(f"weight, tile {tile}", (columns, width), call, 6.0 * columns * width)


def holding(tensors: object, call: Call) -> Call:
    """A call of a kernel that has only the addresses of tensors, which it keeps alive."""
    return lambda: (call(), tensors)


def checked(launch: Call, *pairs: tuple[Tensor, Tensor], share: float = 0.0) -> Call:
    """Launch a kernel, and compare its bytes: of each pair a `share` at most may differ."""
    launch()
    for codes, expected in pairs:
        apart = int((codes.view(-1) != expected.view(torch.uint8).reshape(-1)).sum())
        if apart > share * codes.numel():
            raise ValueError(f"{apart} of {codes.numel()} bytes are wrong")
    return launch


def tiled_product(
    make: Callable[[], FusedInput], format: str, sums: bool, tile: tuple[int, int, int]
) -> Call:
    from fp8stack.layers.kernels.triton_kernels import cast_product as kernel

    product, (high, wide, warps) = make(), tile
    x, width, columns = product.x, fused_casts._width(product), product.shape[1]
    scale, exact = torch.ones((), device=x.device), variants.converts_exactly(x.device)
    outputs: Row = {"columnwise": True, "record": True, "sums": sums}
    variant = fused_casts.product_variant(product, Quantizer(format=format), exact, **outputs)
    variant = replace(variant, rows=high, columns=wide)
    down, right = -(-len(x) // high), -(-width // wide) * (columns // width)
    data, transposed = x.new_empty((2, len(x) * columns), dtype=torch.uint8)
    amaxes, total = x.new_empty(down * right).float(), x.new_empty(down, columns).float()
    inputs = x, x if product.dy is None else product.dy, scale
    launch = partial(
        kernel[(down * right,)], *inputs, data, transposed, x, x, amaxes, total, len(x), width,
        HOW=variant, **(variants.OPTIONS | {"num_warps": warps}),
    )  # fmt: skip
    copies = cast_product(product, scale, format, **outputs)
    assert copies.transposed is not None
    # torch's exp and erf, which a CPU has, differ from Triton's by a bit
    share = 0.0 if x.is_cuda or product.name == "cast" else 0.01
    return checked(launch, (data, copies.data), (transposed, copies.transposed), share=share)


def tiled_transpose(codes: Tensor, tile: tuple[int, int, int]) -> Call:
    from fp8stack.layers.kernels.triton_kernels import transpose_bytes as kernel

    (rows, columns), (side, _, warps) = codes.shape, tile
    result = codes.new_empty(columns, rows)
    options = variants.OPTIONS | {"num_warps": warps, "SIZE": side, "IN_GROUP": 4}
    tile_count = -(-rows // side) * -(-columns // side)
    sizes = rows, columns, *codes.stride()
    launch = partial(kernel[(tile_count,)], codes, result, *sizes, **options)
    return checked(launch, (result, codes.t()))


def tiled_weight(weight: Tensor, tile: tuple[int, int, int]) -> Call:
    from fp8stack.layers.kernels.triton_kernels import cast_weights as kernel

    (rows, columns), (high, wide, warps) = weight.shape, tile
    data, transposed = weight.new_empty((2, rows * columns), dtype=torch.uint8)
    inverse, scales, amaxes = weight.new_ones((3, 1))
    tensors = weight, data, transposed, inverse, inverse
    row = [*(t.data_ptr() for t in tensors), rows, columns, 0, 0]
    table = torch.tensor([row], dtype=torch.int64).to(weight.device)
    owners = table.new_zeros(-(-rows // high) * -(-columns // wide), dtype=torch.int32)
    options: Row = {"record": True, "rows": high, "columns": wide}
    exact = variants.converts_exactly(weight.device)
    variant = variants.variant(Quantizer(), "given", FLOAT32, exact, **options)
    launch = partial(
        kernel[(len(owners),)], table, owners, scales, amaxes, HOW=variant, ALIGNED=True, SPACING=1,
        **(variants.OPTIONS | {"num_warps": warps}),
    )  # fmt: skip
    expected = cast_to_fp8(weight, scales[0], "e4m3")
    checked(launch, (data, expected), (transposed, expected.view(torch.uint8).t()))
    return holding(tensors, launch)


GROUPS: dict[str, Callable[[Shapes], Iterator[Case]]] = {
    "machine": machine,
    "gemms": gemms,
    "attention": attention,
    "optimizer": optimizer,
    "casts": casts,
    "elementwise": elementwise,
    "tiles": tiles,
}


def times_us(calls: list[Call], device: str) -> tuple[list[float], bool]:
    """Microseconds of a call, in turns of all `calls`, and whether a graph replayed them, which it
    cannot on a CPU."""
    if device == "cpu":
        return [clocked_us(calls) for _ in range(3)][1:], False
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        clocked_us(calls)  # it compiles
    torch.cuda.synchronize()
    graph, replayed = torch.cuda.CUDAGraph(), True
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            clocked_us(calls)
    except RuntimeError as error:
        replayed = False
        print(f"no graph: {str(error).splitlines()[0]}", flush=True)
        torch.cuda.synchronize()
    samples = []
    for _ in range(REPLAYS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay() if replayed else clocked_us(calls)
        end.record()
        torch.cuda.synchronize()
        samples.append(1000 * begin.elapsed_time(end) / len(calls))
    return samples[1:], replayed  # the first warmed up


def clocked_us(calls: list[Call]) -> float:
    """Microseconds of a call by the host's clock, which waits for nothing."""
    begin = time.perf_counter()
    for call in calls:
        call()
    return 1e6 * (time.perf_counter() - begin) / len(calls)


def measured(case: Case, device: str) -> Row:
    """The row of a case. Inputs take turns where they would fit in a cache."""
    on_gpu = device != "cpu"
    sets = max(1, min(8, int(CACHE_BYTES / case.moved) + 1)) if on_gpu else 1
    calls = [case.make() for _ in range(sets)]
    least_us = max(case.moved / RATES[0], case.flops / RATES[1])
    if on_gpu:  # a replay takes about 20 ms, or one turn of the inputs
        calls *= max(1, min(CALLS, int(20e3 / least_us)) // sets)
    samples, replayed = times_us(calls, device)
    us = statistics.median(samples)
    row: Row = {
        "us": round(us, 3),
        "low_us": round(min(samples), 3),
        "high_us": round(max(samples), 3),
    }
    row |= {"tb_s": round(case.moved / us / 1e6, 6), "graph": replayed if on_gpu else None}
    return row | ({"tflop_s": round(case.flops / us / 1e6, 6)} if case.flops else {})


def launches(device: str) -> Iterator[Row]:
    """Launches of a kernel that does next to nothing, by torch and in a graph; Python's calls."""
    x = torch.ones((), device=device)
    calls: list[Call] = [partial(x.add_, 1.0)] * LAUNCHES
    for name, timed in (("a launch, host", calls), ("a call in Python", [lambda: None] * LAUNCHES)):
        samples = []
        for _ in range(REPLAYS):
            wait_for(device)
            samples.append(clocked_us(timed))
        yield {"name": name, "us": round(statistics.median(samples), 4)}
    if device != "cpu":
        yield {"name": "a launch in a graph", "us": statistics.median(times_us(calls, device)[0])}


def surroundings() -> Row:
    """The machine: kernel, virtualization, processor, and the GPU's clocks and limits."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    query = "clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,memory.total"
    return {
        "kernel": f"{platform.release()} {platform.version()}",
        "virtual": output("systemd-detect-virt") or ("hypervisor" in info and "a hypervisor"),
        "cpu": info.partition("model name")[2].partition("\n")[0].strip("\t: "),
        "cores": os.cpu_count(),
        "gpu": output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
    }


def words(row: Row) -> str:
    """A row in words."""
    text = f"{row['name']} {' x '.join(map(str, row.get('size', ())))}: "
    if "failed" in row:
        return f"{text}failed: {row['failed']}"
    text += f"{row['us']:.2f} us"
    for key, unit in (("tb_s", "TB/s"), ("tflop_s", "TFLOP/s")):
        text += f", {row[key]:.4g} {unit}" if key in row else ""
    return f"{text}, without a graph" if row.get("graph") is False else text


def headlines(group: str, rows: list[Row]) -> Iterator[str]:
    """The lines of a group in the visit's summary: all rows of the machine; the best tile of each
    kernel; else the median rate, and the slowest rows."""
    timed = [row for row in rows if "us" in row]
    key = "tb_s" if group != "gemms" else "tflop_s"
    rated = sorted((row for row in timed if key in row), key=lambda row: row[key])
    median = f", median {rated[len(rated) // 2][key]:.4g} {key}" if rated else ""
    yield f"{group}: {len(timed)} of {len(rows)} measured{median}"
    if group == "tiles":
        by_kernel: dict[str, list[Row]] = {}
        for row in timed:
            kernel = f"{row['model']}, {row['name'].partition(', tile')[0]}"
            by_kernel.setdefault(kernel, []).append(row)
        for same in by_kernel.values():
            best = min(same, key=lambda row: row["us"])
            yield f"{words(best)} (the present: {same[0]['us']:.2f} us)"
    else:
        yield from map(words, timed if group == "machine" else rated[:2])


def tiny(shapes: Shapes) -> Shapes:
    """The same operations at sizes for a CPU."""
    sizes = {"vocabulary": 90, "context": 32, "layers": 1, "width": 32, "heads": 2, "mlp_width": 64}
    sizes["kv_heads"] = 2 if shapes.config.kv_heads is None else 1
    return shapes._replace(config=shapes.config.model_copy(update=sizes), rows=64)


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
    models = [Shapes(name, load_config(name), rows, device) for name, rows in ROWS.items()]
    models = list(map(tiny, models)) if arguments.dry_run else models
    append_line(arguments.out, {"facts": facts(hardware), "machine": surroundings()})
    if "machine" in arguments.groups:
        print(f"{HEADLINE}{hardware}; {surroundings()}", flush=True)
    failed = False
    for group in arguments.groups:
        rows = list(launches(device)) if group == "machine" else []
        for row in rows:
            append_line(arguments.out, {"group": group} | row)
        late = 0
        for shapes in models[:1] if group == "machine" else models:
            for case in GROUPS[group](shapes):
                if time.monotonic() > end:
                    late += 1
                    continue
                row = {"group": group, "model": shapes.model, "name": case.name, "size": case.size}
                try:
                    row |= measured(case, device)
                except Exception as error:  # of any kind: the next is measured all the same
                    failed = True
                    row["failed"] = f"{type(error).__name__}: {str(error)[:150]}"
                rows.append(row)
                append_line(arguments.out, row)
                print(words(row), flush=True)
        for line in headlines(group, rows):
            print(f"{HEADLINE}{line}", flush=True)
        if late:
            print(f"{HEADLINE}{group}: {late} left out for want of time", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
