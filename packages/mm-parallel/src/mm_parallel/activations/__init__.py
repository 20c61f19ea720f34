"""What the backward needs of the forward: recompute and offload."""
