"""`fp8stack compare`: trains a model in every recipe with every seed, then writes a table and a
plot. Each run is an ordinary run of `fp8stack pretrain` in its own process."""
