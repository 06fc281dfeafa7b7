"""The check of machine code itself; the kernels' tests apply it to their code.

Triton 3.6, which torch 2.10 and 2.11 bring, has a ptxas of its own. To check its code: `pip install
--no-deps --target FOLDER triton==3.6.0`, and run the tests of this folder with FOLDER first in
PYTHONPATH, slow ones included.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.support.sass import unwritten_registers

pytest.importorskip("triton")

_PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 p) {{
    .reg .b16 %h;
    .reg .b32 %r<4>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [p];
    ld.global.b32 %r1, [%rd1];
    {0}
    st.global.b32 [%rd1+4], %r3;
    ret;
}}
"""
_TO_E4M3 = "mov.b32 %r3, 0; cvt.rn.satfinite.e4m3x2.f32 %h, {0};"


@pytest.mark.parametrize(
    ("instruction", "is_right"),
    [
        ("add.u32 %r3, %r1, 5;", True),
        ("mul.lo.u32 %r3, %r1, %r2;", False),
        ("", False),
        # Two numbers to a register, of which a byte is stored, or both.
        (f"{_TO_E4M3.format('%r2, %r1')} st.global.b8 [%rd1+8], %h;", True),
        (f"{_TO_E4M3.format('%r1, %r2')} st.global.b8 [%rd1+8], %h;", False),
        (f"{_TO_E4M3.format('%r2, %r1')} st.global.b16 [%rd1+8], %h;", False),
    ],
)
def test_a_register_that_nothing_wrote_is_found(instruction, is_right, tmp_path):
    from triton.backends.nvidia.compiler import get_ptxas

    (ptx := tmp_path / "kernel.ptx").write_text(_PTX.format(instruction))
    cubin = tmp_path / "code.cubin"
    command = [get_ptxas(90).path, "--gpu-name=sm_90a", str(ptx), "-o", str(cubin)]
    subprocess.run(command, check=True)
    assert (unwritten_registers(cubin.read_bytes(), tmp_path) == []) is is_right
