"""Optimizers over sharded parameters, learning rates, averages."""
