"""Peers on machines of their own: keys, signed offers, rounds and the network."""
