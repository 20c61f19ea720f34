"""Iterations, manifests and files on a disk: what is complete, and how it gets there durably."""
