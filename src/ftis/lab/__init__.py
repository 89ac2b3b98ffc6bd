"""What people run on one machine: arms, seeds, processes, starters, joining, preflight, replay and probes."""
