"""What each operation of a training step computes in, before it runs."""
