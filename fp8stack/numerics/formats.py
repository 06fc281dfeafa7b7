"""The number formats, for the numerics; they are data, and `fp8stack.formats` needs no torch."""

from fp8stack.formats import FORMATS, Format, Fp8Name, fp8_format

__all__ = ["FORMATS", "Format", "Fp8Name", "fp8_format"]
