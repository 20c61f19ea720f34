"""Reading and writing YAML with the place of every value."""
