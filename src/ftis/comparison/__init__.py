"""Comparisons of arms over seeds: budgets, statistics, verdicts."""
