"""What README.md shows works as it stands."""

import re
from pathlib import Path

from slime_core import Sample
from slime_core.options import parse
from slime_core.plugins import Plugins

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_reward_of_the_readme(tmp_path, model_dir):
    source = re.search(r"```python\n(# my_reward\.py\n.*?)```", README, re.DOTALL).group(1)
    path = tmp_path / "my_reward.py"
    path.write_text(source)
    args = parse(["--model", str(model_dir), "--reward", str(path), "--my-reward-bonus", "0.25"]).args
    reward = Plugins().bind("reward", str(path))
    responses = {"so \\boxed{4} 4": 1.25, "4": 1.0, "\\boxed{5}": 0.25, "": 0.0}
    scores = {r: reward(args=args, sample=Sample(response=r, label=4), engine=None) for r in responses}
    assert scores == responses


def test_links_lead_somewhere():
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert targets
    assert [t for t in targets if not (Path(__file__).parents[1] / t).exists()] == []


def test_the_tree_names_what_is_there():
    tree = re.search(r"```\nslime_core/\n(.*?)plugins/", README, re.DOTALL).group(1)
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.strip()}
    package = Path(__file__).parents[1] / "slime_core"
    assert named <= {p.name for p in package.iterdir()}
    assert {p.name for p in package.iterdir() if p.is_dir() and p.name != "__pycache__"} <= named
