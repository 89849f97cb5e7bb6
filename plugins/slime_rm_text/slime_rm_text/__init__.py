"""Rewards for text: `f1`, `exact_match`, `gpqa` (multiple choice), `ifeval` (verifiable instructions)."""
