"""Checks before a run: its needs, its prospects, and the missing parts of this machine."""
