"""A run's checkpoints: saved, found again, restored."""
