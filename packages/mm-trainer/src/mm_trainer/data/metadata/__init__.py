"""Tables of samples, in any format people keep them in."""
