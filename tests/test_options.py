"""Options: flags, TOML and environment, two phases, errors with suggestions, resume."""

from pathlib import Path

import pytest

from slime_core import OptionError
from slime_core.options import Options, RewardChoice, parse, write_options

PLUGIN = """
from slime_core import hookimpl

@hookimpl
def add_options(parser):
    parser.add_argument("--bonus-factor", type=float, default=0.5)

@hookimpl
def reward(args, sample):
    return args.bonus_factor
"""


def parse_args(model_dir: Path, *words: str) -> Options:
    return parse(["--model", str(model_dir), *words]).args


def test_a_plugins_flags_exist_only_when_it_is_named(model_dir, install_package):
    install_package("slime-bonus", {"bonus": "mod_bonus"}, mod_bonus=PLUGIN)
    assert parse_args(model_dir, "--reward", "bonus", "--bonus-factor", "2").bonus_factor == 2.0
    with pytest.raises(OptionError, match="flags of plugin 'bonus' exist only when a flag names the plugin"):
        parse_args(model_dir, "--bonus-factor", "2")


def test_rewards_have_weights_and_some_always_count(model_dir, install_package):
    install_package("slime-bonus", {"bonus": "mod_bonus", "other": "mod_bonus_2"}, mod_bonus=PLUGIN, mod_bonus_2=REWARD)
    args = parse_args(model_dir, "--reward", "bonus=0.5", "+other=2", "--reward-field", "kind")
    assert args.reward == [RewardChoice("bonus", 0.5), RewardChoice("other", 2.0, always=True)]


REWARD = PLUGIN.replace("bonus", "other")


def test_flags_beat_the_environment_beats_the_file(model_dir, tmp_path, monkeypatch):
    config = tmp_path / "run.toml"
    config.write_text("[rollout]\nrollout_batch_size = 3\ntemperature = 0.5\nn-samples-per-prompt = 2\n")
    monkeypatch.setenv("SLIME_TEMPERATURE", "0.7")
    monkeypatch.setenv("SLIME_N_SAMPLES_PER_PROMPT", "5")
    args = parse_args(model_dir, "--config", str(config), "--n-samples-per-prompt", "7")
    assert (args.rollout_batch_size, args.temperature, args.n_samples_per_prompt) == (3, 0.7, 7)


def test_toml_lists_booleans_and_plugins(model_dir, tmp_path, install_package):
    install_package("slime-bonus", {"bonus": "mod_bonus"}, mod_bonus=PLUGIN)
    config = tmp_path / "run.toml"
    config.write_text(
        'reward = ["bonus=2"]\nstop = ["a", "b c"]\nskip-bad-rows = true\nshuffle = false\nbonus-factor = 9\n'
    )
    args = parse_args(model_dir, "--config", str(config))
    assert args.reward == [RewardChoice("bonus", 2.0)]
    assert (args.stop, args.skip_bad_rows, args.shuffle, args.bonus_factor) == (["a", "b c"], True, False, 9.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rewrd", "x"], r"Unknown flag --rewrd; did you mean --reward\?"),
        (["--temperature", "hot"], "--temperature: 'hot' is not a number"),
        (["--rollout-batch-size", "0"], "'0' is not a whole number of at least 1"),
        (["--top-p", "1.5"], "not a number from 0 to 1"),
        (["--prompt-data", "nope.jsonl"], r"no data file .*nope\.jsonl"),
        (["--over-sampling-batch-size", "2", "--rollout-batch-size", "4"], "is smaller than --rollout-batch-size 4"),
        (["--reward", "x=heavy"], "'x=heavy' must look like NAME or NAME=WEIGHT"),
        (["--generate", "nope"], "no plugin named 'nope' is installed"),
        (["--generate", "fifo"], "plugin 'fifo' from slime-core .* does not implement 'generate'"),
        (["--resume", "never"], "there is no run 'never'"),
        (["--run-name", "a/b"], "cannot be a directory name"),
        (["--policy-loss", "sft", "stray"], "Unexpected word 'stray'"),
    ],
)
def test_bad_input_is_refused_by_name(model_dir, words, message):
    with pytest.raises(Exception, match=message):
        parse_args(model_dir, *words)


def test_a_model_directory_that_is_not_one_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"is not a model directory: it has no config\.json"):
        parse(["--model", str(tmp_path)])
    with pytest.raises(OptionError, match="--model is needed"):
        parse([])


def test_an_unknown_key_names_the_file_and_suggests(model_dir, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("rollout-batch-sise = 3\n")
    with pytest.raises(OptionError, match=r"'rollout-batch-sise' in .*run\.toml; did you mean 'rollout-batch-size'"):
        parse_args(model_dir, "--config", str(config))


def test_broken_toml_and_doubled_keys_are_refused(model_dir, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("a = = 1")
    with pytest.raises(OptionError, match="is not valid TOML"):
        parse_args(model_dir, "--config", str(config))
    config.write_text("temperature = 1\n[rollout]\ntemperature = 2\n")
    with pytest.raises(OptionError, match="'temperature' stands twice"):
        parse_args(model_dir, "--config", str(config))


def test_options_are_read_only(model_dir):
    with pytest.raises(AttributeError, match="read-only"):
        parse_args(model_dir).temperature = 2.0


def test_resume_takes_the_runs_own_options_and_flags_change_them(model_dir, tmp_path, install_package):
    install_package("slime-bonus", {"bonus": "mod_bonus"}, mod_bonus=PLUGIN)
    words = [
        "--reward",
        "bonus=0.5",
        "--bonus-factor",
        "3",
        "--no-shuffle",
        "--stop",
        "a b",
        "--runs-dir",
        str(tmp_path / "runs"),
    ]
    first = parse_args(model_dir, *words, "--run-name", "one", "--chat-template-kwargs", '{"think": false}')
    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    write_options(first, run_dir / "options.toml")
    again = parse(["--resume", str(run_dir), "--num-rollout", "7"]).args
    changed = {key for key in vars(first) if vars(first)[key] != vars(again)[key]}
    assert changed == {"config", "resume", "num_rollout"}
    assert again.num_rollout == 7


def test_paths_are_absolute_and_files_of_plugins_too(model_dir, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(PLUGIN.replace("bonus", "mine"))
    monkeypatch.chdir(tmp_path)
    args = parse(["--model", "model", "--reward", "./mine.py=2"]).args
    assert args.model == str(model_dir)
    assert args.reward == [RewardChoice(str(tmp_path / "mine.py"), 2.0)]
