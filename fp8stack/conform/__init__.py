"""Does this machine compute what the formats say? Checks of every cast, scale and GEMM on it,
against references that share no code with them."""
