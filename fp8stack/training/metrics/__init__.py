"""What a run measures, and where it writes and shows it."""
