"""Set up a run: build data, model and optimizer, and restore a checkpoint."""
