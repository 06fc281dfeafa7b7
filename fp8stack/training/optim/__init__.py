"""Optimizers, gradient clipping and the loss scale."""
