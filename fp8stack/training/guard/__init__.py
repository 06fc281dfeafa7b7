"""The guard: detects bad steps, skips them, and decides what to do about them."""
