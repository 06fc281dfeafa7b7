TOKENS = 8192
"""Of the pass whose kernels are counted."""
