import pytest

from slime_core.testing import check_plugin

FLAGS = {"length_range": ["--length-range-max", "20"]}


@pytest.mark.parametrize(
    "name",
    [
        "nonzero_std",
        "not_truncated",
        "length_range",
        "any_correct",
        "pass_rate_range",
        "reward_std",
        "stale_first",
        "highest_reward",
    ],
)
def test_a_filter_keeps_the_contract(name):
    check_plugin(name, *FLAGS.get(name, []))
