"""A run before it runs: its configuration, and the memory, operations and time of its steps."""
