"""Filters of finished groups: `nonzero_std` and `reward_std`."""
