"""Runs: a peer is assembled, trained, saved and resumed; arms, seeds and processes."""
