"""Comparisons on one machine: arms, seeds, workers, results, figures and the page."""
