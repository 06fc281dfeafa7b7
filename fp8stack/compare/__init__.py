"""`fp8stack compare`: every recipe with every seed, and what came of it as a table and a figure.
Each run is an ordinary run of `fp8stack pretrain` in a process of its own."""
