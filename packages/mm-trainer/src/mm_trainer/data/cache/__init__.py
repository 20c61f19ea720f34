"""Conditions that frozen encoders made once: writing, reading, refusing what is stale."""
