"""The state of a run's peers, counted from their records: their sources, their troubles, their time left."""
