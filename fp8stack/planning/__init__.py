"""Memory, operations and time of a training step, from one trace of the model, before it runs."""
