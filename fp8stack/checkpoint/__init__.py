"""Checkpoints: written, found, verified, restored."""
