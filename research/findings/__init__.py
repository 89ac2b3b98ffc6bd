"""The measurements: a page for each question, its tables written by ``python -m research.findings`` from data/."""
