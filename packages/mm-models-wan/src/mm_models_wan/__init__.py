"""Wan2.2 for mm-trainer: diffusion transformer, VAE and text-encoder wrappers, pipelines, key maps, recipes."""
