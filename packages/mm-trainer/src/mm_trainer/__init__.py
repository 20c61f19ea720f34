"""A training engine for generative models made of heterogeneous sub-models. It has no knowledge of any model.

What plugins use is in `mm_trainer.contracts`, `mm_trainer.pipelines`, `mm_trainer.randomness` and
`mm_trainer.registry`. Importing this package imports no torch.
"""

from mm_trainer.__about__ import __version__

__all__ = ["__version__"]
