"""Whether the log-probabilities that other peers report can be true."""
