"""The cost of training: time, memory, start-up."""
