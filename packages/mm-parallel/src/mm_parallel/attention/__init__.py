"""Attention over a sequence that a group of ranks shares."""
