"""What a run measures and where it tells it."""
