"""Environments, in which a completion has several turns: their contract, how an episode is played, and two of them."""
