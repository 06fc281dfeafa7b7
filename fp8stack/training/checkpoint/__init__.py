"""Checkpoints: writing, finding, verifying and restoring them."""
