"""Bits that a kernel promises to keep whatever is computed beside them."""
