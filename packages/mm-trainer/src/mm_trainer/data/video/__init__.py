"""Clips and captions: reading, shaping, tokenising."""
