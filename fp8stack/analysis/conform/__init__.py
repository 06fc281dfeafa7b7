"""Checks that this machine computes what the formats say: every cast, scale and GEMM, against
references that share no code with them."""
