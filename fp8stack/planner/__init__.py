"""The dtypes in which each operation of a training step computes, before it runs."""
