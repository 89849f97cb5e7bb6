"""Finding, loading and binding plugins: names, errors, colours, wrappers."""

import argparse
import asyncio
import sys

import pytest

from slime_core import OptionError, PluginError, Sample
from slime_core.plugins import Plugins, find, installed, load_plugins, plugin_name
from slime_core.testing import make_options

REWARD = """
from slime_core import hookimpl

@hookimpl
def reward(sample):
    return 2.0
"""


def test_only_the_named_entry_point_is_imported(install_package):
    install_package("slime-good", {"good": "mod_good"}, mod_good=REWARD)
    install_package("slime-broken", {"broken": "mod_broken"}, mod_broken="import does_not_exist")
    plugins = Plugins()
    assert plugins.load("good") == "good"
    assert "mod_broken" not in sys.modules
    assert {"good", "broken"} <= {f.name for f in installed()}


def test_a_name_nobody_provides_is_refused_with_a_suggestion(install_package):
    install_package("slime-good", {"arithmetic": "mod_good"}, mod_good=REWARD)
    with pytest.raises(PluginError, match=r"no plugin named 'arithmetik' is installed; did you mean 'arithmetic'\?"):
        find("arithmetik")


def test_two_packages_with_one_name_clash_only_when_it_is_named(install_package):
    install_package("slime-a", {"x": "mod_a", "only_a": "mod_a"}, mod_a=REWARD)
    install_package("slime-b", {"x": "mod_b"}, mod_b=REWARD)
    assert Plugins().load("only_a") == "only_a"
    with pytest.raises(PluginError, match="slime-a and slime-b both provide 'x'; uninstall one"):
        Plugins().load("x")


def test_a_plugin_that_does_not_import_says_why(install_package):
    install_package("slime-x", {"x": "mod_x"}, mod_x="import does_not_exist")
    expected = "plugin 'x' from slime-x 1.0 could not be loaded: ModuleNotFoundError: No module named 'does_not_exist'"
    with pytest.raises(PluginError, match=expected):
        Plugins().load("x")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("@hookimpl\ndef rewrad(sample): return 1.0", "there is no hook 'rewrad'; did you mean 'reward'?"),
        ("@hookimpl\ndef reward(smple): return 1.0", "smple"),
        ("def reward(sample): return 1.0", "implements no hook; mark its functions with @hookimpl"),
        ("@hookimpl\ndef generate(sample): return [sample]", "'generate' must be `async def`"),
        ("@hookimpl\nasync def dynamic_filter(samples): return None", "'dynamic_filter' must be a plain `def`"),
        ("@hookimpl(hookwrapper=True)\ndef reward(sample): yield", "old style"),
    ],
)
def test_a_plugin_that_breaks_the_contract_is_refused(tmp_path, source, message):
    path = tmp_path / "mine.py"
    path.write_text(f"from slime_core import hookimpl\n{source}\n")
    with pytest.raises(PluginError, match=message.replace("?", r"\?")):
        Plugins().load(str(path))


def test_a_file_and_a_module_are_plugins_too(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    assert Plugins().bind("reward", "./my_reward.py")(args=None, sample=Sample(), engine=None) == 2.0
    package = tmp_path / "pkg_for_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "scores.py").write_text(REWARD)
    assert Plugins().load("pkg_for_test.scores") == "scores"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PluginError, match=r"there is no plugin file .*nope\.py"):
        Plugins().load(str(tmp_path / "nope.py"))


@pytest.mark.parametrize(
    ("reference", "name"),
    [("math", "math"), ("./a/my_reward.py", "my_reward"), ("pkg.sub.mod", "mod"), ("./x.py:Plugin", "x")],
)
def test_plugin_name(reference, name):
    assert plugin_name(reference) == name


def test_two_references_of_one_name_are_refused(tmp_path):
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "mine.py").write_text(REWARD)
    plugins = Plugins()
    plugins.load(str(tmp_path / "a" / "mine.py"))
    with pytest.raises(PluginError, match="both called 'mine'; rename one"):
        plugins.load(str(tmp_path / "b" / "mine.py"))


def test_a_plugin_without_the_hook_says_which_it_has(install_package):
    install_package("slime-x", {"x": "mod_x"}, mod_x=REWARD)
    with pytest.raises(PluginError, match="does not implement 'generate'; it implements 'reward'"):
        Plugins().bind("generate", "x")


CLASS_PLUGIN = """
from slime_core import hookimpl

class Plugin:
    def __init__(self, args):
        args.built.append("built")
        self.args = args

    @staticmethod
    @hookimpl
    def add_options(parser):
        parser.add_argument("--x-bonus", type=float, default=1.5)

    @hookimpl
    def reward(self, args, sample):
        return args.x_bonus

    def close(self):
        self.args.built.append("closed")
"""


def test_a_class_plugin_is_built_once_and_closed(install_package):
    install_package("slime-x", {"x": "mod_x:Plugin"}, mod_x=CLASS_PLUGIN)
    args = argparse.Namespace(plugin=[], built=[], x_bonus=4.0)
    plugins = load_plugins(args, ["x"])
    assert plugins.bind("reward", "x")(args=args, sample=Sample(), engine=None) == 4.0
    plugins.close()
    assert args.built == ["built", "closed"]


def test_a_class_plugins_options_come_before_it_is_built(install_package):
    install_package("slime-x", {"x": "mod_x:Plugin"}, mod_x=CLASS_PLUGIN)
    plugins = Plugins()
    plugins.load("x")
    parser = argparse.ArgumentParser()
    plugins.add_options(parser)
    assert parser.parse_args(["--x-bonus", "2"]).x_bonus == 2.0


CONFIGURE = """
from slime_core import OptionError, hookimpl

{definition}
    raise OptionError("nothing can be configured")
"""


@pytest.mark.parametrize(
    "definition",
    [
        "@hookimpl\ndef configure(args):",
        "@hookimpl\ndef configure():",
        "class Plugin:\n  def __init__(self, args): raise AssertionError\n"
        "  @staticmethod\n  @hookimpl\n  def configure(args):",
    ],
    ids=["function", "function without arguments", "static method"],
)
def test_options_are_checked_before_anything_is_built(tmp_path, definition):
    path = tmp_path / "strict.py"
    path.write_text(CONFIGURE.format(definition=definition))
    with pytest.raises(OptionError, match="nothing can be configured"):
        make_options("--plugin", f"{path}:Plugin" if "class" in definition else str(path))


def test_a_configure_that_needs_the_built_plugin_waits_for_it(tmp_path):
    definition = "class Plugin:\n  def __init__(self, args): pass\n  @hookimpl\n  def configure(self, args):"
    path = tmp_path / "strict.py"
    path.write_text(CONFIGURE.format(definition=definition))
    args = make_options("--plugin", f"{path}:Plugin")
    with pytest.raises(OptionError, match="nothing can be configured"):
        load_plugins(args, [])


def test_a_flag_without_the_plugins_prefix_is_refused(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD + "\n@hookimpl\ndef add_options(parser):\n    parser.add_argument('--bonus')\n")
    plugins = Plugins()
    plugins.load(str(path))
    with pytest.raises(PluginError, match="adds the flag --bonus; a plugin's flags must start with --my-reward-"):
        plugins.add_options(argparse.ArgumentParser())


WRAPPER = """
from slime_core import hookimpl

@hookimpl(wrapper=True)
def reward(sample):
    sample.metadata["log"].append("{name} before")
    try:
        result = yield
    except ValueError:
        sample.metadata["log"].append("{name} saw the error")
        return -1.0
    sample.metadata["log"].append("{name} after")
    return result + {add}
"""


def wrapped(tmp_path, body: str) -> tuple[Plugins, str]:
    (tmp_path / "inner.py").write_text(f"from slime_core import hookimpl\nimport asyncio\n{body}\n")
    for name, add in (("first", 10), ("second", 100)):
        (tmp_path / f"{name}.py").write_text(WRAPPER.format(name=name, add=add))
    args = argparse.Namespace(plugin=[str(tmp_path / "first.py"), str(tmp_path / "second.py")])
    reference = str(tmp_path / "inner.py")
    return load_plugins(args, [reference]), reference


def test_the_last_loaded_wrapper_is_outermost_and_changes_the_result(tmp_path):
    plugins, reference = wrapped(tmp_path, "@hookimpl\ndef reward(sample):\n    return 1.0")
    sample = Sample(metadata={"log": []})
    assert plugins.bind("reward", reference)(args=None, sample=sample, engine=None) == 111.0
    assert sample.metadata["log"] == ["second before", "first before", "first after", "second after"]


async def test_an_async_body_is_awaited_before_the_wrappers_resume(tmp_path):
    body = (
        "@hookimpl\nasync def reward(sample):\n    await asyncio.sleep(0)\n"
        "    sample.metadata['log'].append('body')\n    return 1.0"
    )
    plugins, reference = wrapped(tmp_path, body)
    sample = Sample(metadata={"log": []})
    call = plugins.bind("reward", reference)(args=None, sample=sample, engine=None)
    assert asyncio.iscoroutine(call)
    assert await call == 111.0
    assert sample.metadata["log"][2] == "body"


def test_an_error_reaches_the_wrappers_and_may_be_answered(tmp_path):
    plugins, reference = wrapped(tmp_path, "@hookimpl\ndef reward(sample):\n    raise ValueError('no')")
    sample = Sample(metadata={"log": []})
    assert plugins.bind("reward", reference)(args=None, sample=sample, engine=None) == 99.0
    assert sample.metadata["log"][-2:] == ["first saw the error", "second after"]


def test_an_error_nobody_answers_goes_on(tmp_path):
    plugins, reference = wrapped(tmp_path, "@hookimpl\ndef reward(sample):\n    raise KeyError('no')")
    with pytest.raises(KeyError):
        plugins.bind("reward", reference)(args=None, sample=Sample(metadata={"log": []}), engine=None)
