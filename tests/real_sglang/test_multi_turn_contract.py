"""Turns against real SGLang."""

from engines.test_multi_turn_contract import *  # noqa: F403
