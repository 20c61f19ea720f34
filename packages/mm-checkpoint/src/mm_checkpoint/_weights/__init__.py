"""Weights in and out: sources, loading into shards, conversion, export."""
