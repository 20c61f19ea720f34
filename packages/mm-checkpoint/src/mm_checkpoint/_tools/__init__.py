"""What a user asks of a folder: what is in it, and is it whole."""
