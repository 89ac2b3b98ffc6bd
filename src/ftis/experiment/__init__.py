"""Experiments: arms, seeds and processes on one machine."""
