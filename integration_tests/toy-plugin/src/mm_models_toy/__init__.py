"""A third-party model for mm-trainer: denoise clips of moving squares."""
