"""Evidence that travels: whether records are of a tree, told where there may be no GPU."""
