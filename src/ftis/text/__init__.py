"""Completions as text, and the units of likelihood that two tokenizers have in common."""
