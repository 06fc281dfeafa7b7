"""The GPT, its shape, its loss and its samples, and the conversion of other models."""
