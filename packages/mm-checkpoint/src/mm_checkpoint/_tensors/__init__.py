"""Tensors as named boxes of bytes: sources, dtypes, key maps applied, local shards."""
