"""Measurements of the error of low precision, and of gradients, in sampled training steps."""
