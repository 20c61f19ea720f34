"""FSDP2 by name patterns: units, initialisation, gradients, report."""
