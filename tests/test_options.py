"""Options: flags, TOML and environment, two phases, errors with suggestions, resume."""

from pathlib import Path

import pytest

from slime_core import OptionError
from slime_core.options import DataFile, Options, RewardChoice, data_file, eval_data, parse, write_options

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
        (["--top-p", "1.5"], "not a number above 0 and at most 1"),
        (["--top-p", "0"], "--top-p: '0' is not a number above 0 and at most 1"),
        (["--eval-top-p", "0"], "--eval-top-p: '0' is not a number above 0"),
        (["--eval-data", 'x={path="nope.jsonl", top-p=0}'], "data set 'x', top_p: '0' is not a number above 0"),
        (["--eval-data", 'x={path="nope.jsonl", top-k=0}'], "data set 'x', top_k: '0' is neither -1"),
        (["--top-k", "0"], "--top-k: '0' is neither -1 .off. nor a whole number"),
        (["--prompt-data", "nope.jsonl"], r"no data file .*nope\.jsonl"),
        (["--prompt-data", "nope.jsonl@[1:2:3]"], r"'nope.jsonl@\[1:2:3\]' must look like FILE, FILE@\[START:STOP\]"),
        (["--prompt-data", "nope.jsonl=0"], "'0' is not a number above 0"),
        (["--eval-data", "x=nope.jsonl@[a:]"], "must look like FILE"),
        (["--eval-data", "x=nope.jsonl=0.5"], "has a weight; evaluation takes every row"),
        (["--frozen-model", "judge"], "must look like NAME=MODEL_DIRECTORY"),
        (["--frozen-model", "engine=x"], "a frozen model cannot be called 'engine'"),
        (["--frozen-model", "judge=nowhere"], "--frozen-model judge: .*nowhere is not a model directory"),
        (["--frozen-model", "j={num-engines=1}"], "model 'j' needs a path"),
        (["--frozen-model", 'j={path="x", engines=1}'], "model 'j' has an unknown setting 'engines'; there are path"),
        (["--frozen-model", 'j={path="x", num-engines=0}'], "model 'j': '0' is not a whole number of at least 1"),
        (["--multimodal-keys", "video=clips"], "'video=clips' must look like image=FIELD"),
        (["--multimodal-keys", "image=a", "image=b"], "names the field of images twice"),
        (["--over-sampling-batch-size", "2", "--rollout-batch-size", "4"], "is smaller than --rollout-batch-size 4"),
        (["--reward", "x=nan"], "'x=nan' must look like NAME or NAME=WEIGHT"),
        (["--reward", "x=heavy"], "'x=heavy' must look like NAME or NAME=WEIGHT"),
        (["--generate", "nope"], "no plugin named 'nope' is installed"),
        (["--generate", "fifo"], "plugin 'fifo' from slime-core .* does not implement 'generate'"),
        (["--cpu-offload"], "--cpu-offload is FSDP2's; add --data-parallel fsdp2"),
        (["--adam-betas", "0.9", "1"], "--adam-betas 0.9 1: both must be below 1"),
        (["--lora-alpha", "8"], "add --lora-rank"),
        (["--lora-rank", "8", "--freeze-params", "norm"], "--lora-rank trains adapters alone"),
        (["--freeze-params", "("], r"'\(' is no regular expression for names of parameters"),
        (["--save-hf", "1", "--num-trainers", "0"], "--save-hf writes a trained model"),
        (["--train-backend", "megatron", "--data-parallel", "fsdp2"], "--data-parallel is for --train-backend torch"),
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


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("a.jsonl", DataFile("a.jsonl")),
        ("a.jsonl@[:100]", DataFile("a.jsonl", None, 100)),
        ("d/b.parquet@[-20:-1]=0.5", DataFile("d/b.parquet", -20, -1, 0.5)),
        ("a.jsonl@[0:]=1e-3", DataFile("a.jsonl", 0, None, 1e-3)),
        ("lang=en/a.jsonl=2", DataFile("lang=en/a.jsonl", weight=2.0)),
        ("step=3.jsonl", DataFile("step=3.jsonl")),
    ],
)
def test_a_data_file_may_carry_a_slice_and_a_weight(text, file):
    assert data_file(text) == file
    assert data_file(str(file)) == file


def test_data_files_survive_the_options_file(model_dir, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    words = ["--prompt-data", "a.jsonl@[:-5]=0.1", "a.jsonl", "--eval-data", "./a.jsonl@[-5:]"]
    args = parse_args(model_dir, *words, "--multimodal-keys", "image=pictures")
    path = str(tmp_path / "a.jsonl")
    assert args.prompt_data == [DataFile(path, None, -5, 0.1), DataFile(path)]
    assert args.eval_data == [eval_data(f"a={path}@[-5:]")]
    write_options(args, tmp_path / "run.toml")
    again = parse(["--config", str(tmp_path / "run.toml")]).args
    for name in ("prompt_data", "eval_data", "multimodal_keys"):
        assert getattr(again, name) == getattr(args, name)


@pytest.mark.parametrize(
    "words",
    [
        ["--stop=---", "--stop=-x", "--stop", "[/INST]", "a b", "\n"],
        ["--stop=--"],
        ["--reward", "bonus=0.12345678901234567", "--bonus-factor", "1e-7"],
        ["--reward", "+bonus=-3"],
        ["--stop-token-ids", "2", "3", "--top-k", "-1", "--no-shuffle", "--no-grpo-std-normalization"],
        ["--chat-template-kwargs", '{"a": [false, "\\"q\\""]}', "--engine-env", "A=b c", "B=--x"],
        ["--eval-data", "h=a.jsonl", 'k={path="a.jsonl@[:1]", reward=["bonus=0.3333333333333333"], top-k=-1}'],
        ["--engine", "sglang", "--sglang-mem-fraction-static", "0.5", "--sglang-enable-x", "--sglang-list", "a", "b"],
    ],
)
def test_every_option_survives_the_options_file(model_dir, tmp_path, monkeypatch, install_package, words):
    install_package("slime-bonus", {"bonus": "mod_bonus"}, mod_bonus=PLUGIN)
    (tmp_path / "a.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    args = parse_args(model_dir, "--run-name", "one", *words)
    write_options(args, tmp_path / "run.toml")
    again = parse(["--config", str(tmp_path / "run.toml"), "--run-name", "one"]).args
    assert vars(again) == vars(args) | {"config": str(tmp_path / "run.toml")}


def test_the_options_file_is_replaced_whole(model_dir, tmp_path):
    """A run that is killed while it resumes leaves the file as it was, or the new one."""
    path, before = tmp_path / "options.toml", tmp_path / "before.toml"
    write_options(parse_args(model_dir, "--seed", "1"), path)
    before.hardlink_to(path)
    write_options(parse_args(model_dir, "--seed", "2"), path)
    assert "seed = 1\n" in before.read_text() and "seed = 2\n" in path.read_text()
    assert sorted(p.name for p in tmp_path.glob("*options*")) == ["options.toml"]


def test_one_data_file_needs_no_list_in_toml(model_dir, tmp_path):
    (tmp_path / "a b.jsonl").write_text("{}")
    (tmp_path / "run.toml").write_text(f'prompt-data = "{tmp_path}/a b.jsonl@[:3]"')
    args = parse_args(model_dir, "--config", str(tmp_path / "run.toml"))
    assert args.prompt_data == [DataFile(str(tmp_path / "a b.jsonl"), None, 3)]
