"""A run of arms on one machine, under one seed or several, and its processes."""
