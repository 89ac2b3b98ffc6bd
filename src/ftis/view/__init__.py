"""Everything that people see of runs: the terminal, the report and the live page."""
