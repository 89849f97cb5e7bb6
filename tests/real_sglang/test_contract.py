"""The contract of all engines, checked against real SGLang."""

from engines.test_contract import *  # noqa: F403
