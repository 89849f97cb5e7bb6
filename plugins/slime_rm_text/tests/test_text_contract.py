import pytest

from slime_core.testing import check_plugin


@pytest.mark.parametrize("name", ["f1", "exact_match", "gpqa", "ifeval"])
def test_a_text_reward_keeps_the_contract(name):
    check_plugin(name)
