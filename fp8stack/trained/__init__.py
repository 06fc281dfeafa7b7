"""Trained models: load, generate, evaluate and export."""
