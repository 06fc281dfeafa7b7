"""The data sheets of GPUs, and the names that they are found by."""

from __future__ import annotations

import pytest

from fp8stack.precision import assumed
from fp8stack.precision.gpus import GPUS, find_gpu, find_gpus

NAMES = {
    "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200", "NVIDIA B200": "B200", "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA L40S": "L40S", "NVIDIA GeForce RTX 4090": "RTX 4090", "NVIDIA L4": "L4",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla T4": "T4", "NVIDIA L40": "L40", "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX A6000": "RTX A6000", "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 5080": "RTX 5080", "NVIDIA GeForce RTX 3090 Ti": None,
    "NVIDIA GeForce RTX 4080 SUPER": None, "NVIDIA GeForce RTX 5090 Laptop GPU": None,
    "NVIDIA GeForce RTX 4090 D": None, "NVIDIA A10G": None, "NVIDIA GB200": None,
    "NVIDIA H1000": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize("device", NAMES)
def test_a_gpu_is_known_by_the_name_that_its_driver_gives(device):
    gpu = find_gpu(device)
    assert (gpu.name if gpu else None) == NAMES[device]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_data_of_a_gpu_are_in_its_units_and_found_by_its_own_name(gpu):
    assert find_gpu(gpu.name) is gpu
    assert 50 < gpu.half_tflops < 5000
    assert 0.1 < gpu.memory_tb_per_s < 20
    assert (gpu.fp8_tflops is None) == (gpu.capability < (8, 9))
    assert (gpu.fp4_tflops is None) == (gpu.capability < (10, 0))
    if gpu.fp4_tflops:  # GeForce has it in full, unlike the others with float32 accumulation
        times = 8 if gpu.capability[0] > 10 else 4
        assert gpu.fp4_tflops / gpu.half_tflops == pytest.approx(times, rel=0.01)
    if gpu.fp8_tflops:
        assert gpu.fp8_tflops / gpu.half_tflops == pytest.approx(2, rel=0.02)
    assert gpu.source.startswith("NVIDIA")
    assert (gpu.tf32_tflops is None) == (gpu.capability < (8, 0))
    if gpu.tf32_tflops:
        assert gpu.half_tflops / gpu.tf32_tflops == pytest.approx(2, rel=0.03)
        assert gpu.fp32_tflops <= gpu.tf32_tflops
    assert 5 < gpu.fp32_tflops < 130


def test_a_compute_capability_stands_for_both_usual_cards_of_hopper():
    names = {text: [gpu.name for gpu in find_gpus(assumed(text).name)] for text in ("9.0", "8.9")}
    assert names == {"9.0": ["H200", "H100"], "8.9": ["L40S"]}
    assert find_gpus("NVIDIA H900") == ()
