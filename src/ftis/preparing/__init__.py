"""Refusals before anything is written: whether the arms of a recipe can run, their models, prompts and vocabularies."""
