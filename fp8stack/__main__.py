"""`python -m fp8stack` is the command `fp8stack`."""

from fp8stack.cli import main

main()
