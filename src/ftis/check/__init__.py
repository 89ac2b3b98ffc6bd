"""Checks before a run: what it would take, whether it would learn, what is missing."""
