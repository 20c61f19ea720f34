"""Models that nobody who writes mm-trainer would have written: the kinds that its users bring."""
