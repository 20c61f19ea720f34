"""The sections' types."""
