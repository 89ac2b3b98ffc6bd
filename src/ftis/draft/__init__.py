"""A first recipe for a user's models and problems."""
