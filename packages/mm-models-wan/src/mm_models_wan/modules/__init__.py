"""The networks: diffusion transformer, VAE and text encoder, wrapped for the trainer."""
