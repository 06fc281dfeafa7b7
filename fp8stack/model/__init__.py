"""The GPT: configuration, modules, loss and sampling; and the conversion of other models."""
