"""Recipes: what people write, read as typed values, and the arms that they compare."""
