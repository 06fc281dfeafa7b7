"""One training run: configuration, optimizer, loop, checkpoints, what it prints and writes."""
