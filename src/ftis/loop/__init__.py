"""The loop around a peer's rounds: events, records, evaluation and checkpoints."""
