"""The groups of a message in bytes: token ids, or text."""
