"""The senders that a learner hears: limits, penalties, and the no-regret guard with its two tests."""
