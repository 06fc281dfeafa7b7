"""What low precision does to the operands and gradients of a training step."""
