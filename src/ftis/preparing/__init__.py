"""Refusals, before anything is written, of arms whose models, prompts or vocabularies cannot run."""
