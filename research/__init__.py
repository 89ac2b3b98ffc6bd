"""The base of the findings: rivals of F-TIS, attacks, ways to look into a run again, and their recipes.

It imports ``ftis`` and is no part of its wheel. In a clone ``python -m research.replay`` runs, and a recipe names
objectives and attacks by dotted path: ``objective.name = "research.rivals.TOPR"``.
"""
