"""Two versions against each other, without a baseline."""
