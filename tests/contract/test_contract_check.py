"""The check of a plugin against the whole contract finds each way to break it, and nothing in the built-in plugins."""

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from slime_core.cli import main
from slime_core.contract import check
from slime_core.plugins import Plugins
from slime_core.testing import check_plugin, make_sample

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
BUILT_IN = sorted(PROJECT["entry-points"]["slime"])


@pytest.fixture
def plugin(tmp_path):
    """`plugin(source)` -> a file with it."""

    def write(source):
        path = tmp_path / "mine.py"
        header = "from slime_core import Drop, Sample, Status, TrainBatch, hookimpl\n"
        path.write_text(header + textwrap.dedent(source))
        return str(path)

    return write


def problems(reference, *flags, **more):
    return [str(finding) for finding in check(reference, flags, **more) if finding.is_problem]


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_plugins_keep_the_contract(name):
    assert problems(name) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("@hookimpl\ndef rewrad(sample): return 1.0", "there is no hook 'rewrad'"),
        ("@hookimpl\ndef reward(smple): return 1.0", "smple"),
        ("@hookimpl\nasync def dynamic_filter(samples): return None", "must be a plain `def`"),
        (
            "import os, sys\nif 'pytest' not in sys.modules: os._exit(3)\n@hookimpl\ndef reward(sample): return 1.0",
            "its import ended the process",
        ),
        (
            "@hookimpl\ndef add_options(parser): parser.add_argument('--bonus', help='x')\n"
            "@hookimpl\ndef reward(sample): return 1.0",
            "must start with --mine-",
        ),
        (
            "@hookimpl\ndef add_options(parser): parser.add_argument('--mine-bonus')\n"
            "@hookimpl\ndef reward(sample): return 1.0",
            "--mine-bonus has no help text",
        ),
        (
            "@hookimpl\ndef add_options(parser): parser.add_argument('--mine-f', default=lambda: 1, help='x')\n"
            "@hookimpl\ndef reward(sample): return 1.0",
            "--mine-f: its value cannot go to other processes",
        ),
        (
            "import re\n@hookimpl\ndef add_options(parser):\n"
            "    parser.add_argument('--mine-p', default=re.compile('a'), type=re.compile, help='x')\n"
            "@hookimpl\ndef reward(sample): return 1.0",
            "after --resume",
        ),
        ("@hookimpl\ndef configure(args): raise KeyError('x')\n@hookimpl\ndef reward(sample): return 1.0", "KeyError"),
        ("@hookimpl\ndef reward(sample): return float(sample.response.split()[-1] == '4')", "IndexError"),
        ("@hookimpl\ndef reward(sample): return float('nan') if not sample.response else 1.0", "returned nan"),
        ("@hookimpl\ndef group_reward(samples): return [len(s.response.split()[0]) for s in samples]", "IndexError"),
        ("@hookimpl\ndef dynamic_filter(samples): return len(samples) > 1", "must return Drop(reason) or None"),
        ("@hookimpl\ndef dynamic_filter(samples): return Drop('') if len(samples) > 1 else None", "a short text"),
        ("@hookimpl\ndef dynamic_filter(samples): samples[0].reward = 0.0", "it changes the samples"),
        ("@hookimpl\ndef dynamic_filter(samples): return samples[3] and None", "IndexError"),
        ("@hookimpl\ndef over_sampling_filter(groups): return groups[:1]", "must return at least 2 of the groups"),
        ("@hookimpl\ndef buffer_filter(groups): return groups", "return at most that many"),
        ("@hookimpl\ndef buffer_filter(groups, num_groups): return [groups.pop(0) for _ in groups[:num_groups]]",
         "it changes the list"),
        ("@hookimpl\ndef buffer_filter(groups, num_groups):\n"
         "    return sorted(groups, key=lambda g: g[0].reward)[:num_groups]",
         "TypeError"),
        ("@hookimpl\ndef convert_train_data(groups): return {}", "must return a TrainBatch"),
        ("@hookimpl\ndef get_samples(num_prompts): return [Sample()]", "asked for 3 prompts it returned a list of 1"),
        ("@hookimpl\ndef get_samples(state, num_prompts):\n"
         "    state['seen'] = {1, 2}\n    return [Sample() for _ in range(num_prompts)]",
         "cannot be saved as JSON"),
        ("@hookimpl\nasync def generate(sample): return sample", "it returned Sample; return a list"),
        ("@hookimpl\nasync def generate(sample): return [sample]", "still PENDING"),
        ("@hookimpl\nasync def generate(sample):\n    sample.append([1] * 99)\n"
         "    sample.status = Status.COMPLETED\n    return [sample]",
         "99 tokens where max_new_tokens is 24"),
        ("@hookimpl\nasync def generate(sample):\n    sample.metadata['x'] = {1}\n"
         "    sample.status = Status.COMPLETED\n    return [sample]",
         "keep metadata plain"),
        ("@hookimpl\ndef estimate_advantages(batch, round_rewards): return round_rewards", "return a pair"),
        ("@hookimpl\ndef estimate_advantages(batch, round_rewards): return round_rewards, round_rewards",
         "must be float32"),
        ("@hookimpl\ndef policy_loss(batch, logprobs): return (-batch.advantages * logprobs).mean(), {}",
         "one a response token"),
        ("@hookimpl\ndef policy_loss(batch, logprobs): return -batch.advantages * logprobs.detach(), {}", "grad"),
        ("class Plugin:\n    def __init__(self, args): pass\n    @hookimpl\n    def dynamic_filter(self): return None\n"
         "    def close(self): raise OSError('x')", "close() raised OSError"),
    ],
)  # fmt: skip
def test_what_breaks_the_contract_is_found(plugin, source, message):
    reference = plugin(source) + (":Plugin" if "class Plugin" in source else "")
    assert any(message in found for found in problems(reference)), check(reference)


def test_a_grader_that_hangs_is_failed_by_the_core_not_by_the_check(plugin):
    reference = plugin(
        "@hookimpl\ndef reward(sample):\n    while sample.response == '8**8**8**8': pass\n    return 1.0"
    )
    findings = check(reference, ["--reward-timeout-s", "4"])
    assert not any(finding.is_problem for finding in findings)
    assert any("1 were FAILED by the time or memory limit" in str(finding) for finding in findings)


def test_what_needs_flags_is_not_checked_without_them_and_checked_with_them(plugin):
    source = """
    from slime_core import OptionError
    @hookimpl
    def add_options(parser): parser.add_argument("--mine-size", type=int, help="needed")
    @hookimpl
    def configure(args):
        if args.mine_size is None:
            raise OptionError("--mine-size is needed.")
    @hookimpl
    def reward(args, sample): return 1.0 / args.mine_size
    """
    reference = plugin(source)
    assert any(f.state == "-" and "--mine-size is needed" in f.text for f in check(reference))
    assert any("an ordinary sample gets 0.5" in f.text for f in check(reference, ["--mine-size", "2"]))
    assert any("ZeroDivisionError" in f.text for f in check(reference, ["--mine-size", "0"]))


def test_samples_of_ones_own_must_be_graded(plugin):
    reference = plugin("@hookimpl\ndef reward(sample): return float(sample.metadata['points'])")
    assert any(f.state == "-" and "give rows that it can grade" in f.text for f in check(reference))
    check_plugin(reference, samples=[make_sample("4", metadata={"points": 2})])
    with pytest.raises(AssertionError, match="KeyError: 'points'"):
        check_plugin(reference, samples=[make_sample("4")])


def test_the_command_prints_hooks_options_and_findings(plugin, capsys, tmp_path):
    reference = plugin("@hookimpl\ndef reward(sample): return sample.metadata['points']")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"response": "4", "metadata": {"points": 2}}\n')
    assert main(["plugins", "check", reference, "--rows", str(rows)]) == 0
    out = capsys.readouterr().out
    assert "def reward(sample)" in out
    assert "ok      reward: an ordinary sample gets 2" in out
    assert "ok      survives hostile samples:" in out


def test_the_command_fails_for_a_plugin_with_problems_and_passes_flags_on(capsys, plugin):
    reference = plugin(
        "@hookimpl\ndef add_options(parser): parser.add_argument('--mine-x', type=int, default=0, help='x')\n"
        "@hookimpl\ndef reward(args): return 1.0 / args.mine_x"
    )
    assert main(["plugins", "check", reference, "--mine-x", "4"]) == 0
    assert main(["plugins", "check", reference, "--mine-x", "four"]) in (0, 1)
    assert "invalid int value" in capsys.readouterr().out


def test_a_flag_that_no_command_knows_is_refused():
    with pytest.raises(SystemExit):
        main(["plugins", "--bogus"])


def test_every_plugin_has_a_process_of_its_own(install_package, monkeypatch, tmp_path):
    site = install_package("slime-bad", {"bad": "mod_bad"}, mod_bad="import does_not_exist")
    monkeypatch.setenv("PYTHONPATH", str(site))
    command = [sys.executable, "-c", "from slime_core.cli import main; raise SystemExit(main())", "plugins", "check"]
    done = subprocess.run([*command, "bad", "fifo"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "bad  BROKEN" in done.stdout
    assert "ok      buffer_filter" in done.stdout


def test_checking_leaves_nothing_loaded_for_others(plugin):
    check(plugin("@hookimpl\ndef reward(sample): return 1.0"))
    assert Plugins().loaded == {}
