"""Joining: one peer of a swarm, over the network."""
