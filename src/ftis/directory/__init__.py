"""A run's directory: what it began with, who may train in it, how far its swarms are, the way back."""
