"""Rewards from a server: `remote_rm` (a reward service) and `judge` (a language model that grades)."""
