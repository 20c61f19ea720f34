"""What the releases hold: shapes, names in each format, facts beside the weights."""
