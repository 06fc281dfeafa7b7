TOKENS = 8192
"""The tokens of the pass whose kernels are counted."""
