"""Looking at a whole data set before training on it."""
