"""Timing of training steps and layers, and what a GPU could reach."""
