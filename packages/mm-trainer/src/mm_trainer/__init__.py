"""A training engine for generative models made of heterogeneous sub-models."""
