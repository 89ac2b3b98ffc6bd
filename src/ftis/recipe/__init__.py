"""Recipes: people's files read as typed values, and the arms that they compare."""
