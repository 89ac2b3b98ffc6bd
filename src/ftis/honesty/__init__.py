"""The test on the log-probabilities that other peers report, and quarantine for peers that fail it."""
