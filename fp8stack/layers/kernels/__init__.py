"""Tensor operations below the backends: attention, activations, scaled GEMMs, cast kernels."""
