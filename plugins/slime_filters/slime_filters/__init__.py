"""Filters of groups: what is dropped, what is trained first, what is taken from the buffer first."""
