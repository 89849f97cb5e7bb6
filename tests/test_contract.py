"""The hook contract: documented, generated pages true, every built-in plugin in order."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.hookspecs import EITHER_COLOUR
from slime_core.plugins import HOOKS, Plugins, installed

ROOT = Path(__file__).parents[1]
BUILT_IN = [f.name for f in installed() if f.package == "slime-core"]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_says_what_to_return_and_when_it_is_called(hook):
    text = inspect.getdoc(HOOKS[hook])
    first = text.splitlines()[0]
    assert first.endswith((".", ";", ",")) or "." in text.split("\n\n")[0]
    assert "Called" in text, f"{hook} does not say when and where it is called"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_but_the_set_up_has_a_built_in_plugin_or_is_optional(hook):
    optional = {"reward", "group_reward", "dynamic_filter", "over_sampling_filter"}
    plugins = Plugins()
    for name in BUILT_IN:
        plugins.load(name)
    provided = any(plugins.implements(hook, name) for name in BUILT_IN)
    assert provided or hook in optional


def test_colours():
    colours = {hook: inspect.iscoroutinefunction(spec) for hook, spec in HOOKS.items()}
    assert {hook for hook, is_async in colours.items() if is_async} == {"generate", "rollout"}
    assert {"reward", "group_reward"} == EITHER_COLOUR


@pytest.mark.parametrize(("page", "command"), [("hooks.md", ["hooks", "--markdown"]), ("flags.md", ["flags"])])
def test_generated_pages_are_true(page, command):
    code = "from slime_core.cli import main; raise SystemExit(main())"
    fresh = subprocess.check_output([sys.executable, "-c", code, *command], text=True)
    assert (ROOT / "docs" / page).read_text() == fresh, f"run `slime {' '.join(command)} > docs/{page}`"


def test_the_readmes_table_of_hooks_is_true():
    code = "from slime_core.cli import main; raise SystemExit(main())"
    table = subprocess.check_output([sys.executable, "-c", code, "hooks", "--table"], text=True)
    assert table in (ROOT / "README.md").read_text(), "put the output of `slime hooks --table` into README.md"
