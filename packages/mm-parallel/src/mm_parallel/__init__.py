"""FSDP2/HSDP by name patterns, context parallelism, recompute and activation offload for any torch module."""
