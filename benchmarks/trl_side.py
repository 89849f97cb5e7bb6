"""TRL's side of `benchmarks.train_step`: GRPOTrainer, stopped after every step until it is told to go on.

python -m benchmarks.trl_side CASE_AS_JSON FD      started by the benchmark, with the descriptor of its pipe
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NUM_PROMPTS, NUM_SAMPLES = 32, 8
"""Of a round, on both sides."""


@dataclass(frozen=True)
class Case:
    """What both sides train, and for how many rounds."""

    name: str
    model: str
    prompts: str
    max_tokens: int
    warmup_rounds: int
    rounds: int
    lr: float
    trl_micro_batch: int
    """Samples of a forward and backward pass of TRL; slime chooses by itself."""


def wait_for_turn(connection: Connection, facts: dict[str, float]) -> None:
    """Report a round and wait for the word to go on."""
    connection.send(facts)
    connection.recv()


def train_with_trl(case: Case, connection: Connection, directory: str) -> None:
    """GRPOTrainer as it comes, in this process, with a callback that waits."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    facts: dict[str, float] = {}

    class Waiter(TrainerCallback):
        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            wait_for_turn(connection, facts)

    def math_reward(completions: list[Any], completion_ids: list[list[int]], label: list[str], **more: Any) -> Any:
        rewards = [grade(completion[0]["content"], one) for completion, one in zip(completions, label, strict=True)]
        lengths = [len(tokens) for tokens in completion_ids]
        facts.update(length_mean=statistics.fmean(lengths), length_max=max(lengths), reward=statistics.fmean(rewards))
        return rewards

    rows = [json.loads(line) for line in Path(case.prompts).read_text().splitlines()]
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}], "label": row["label"]} for row in rows]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(case.model, padding_side="left"),
        reward_funcs=math_reward,
        train_dataset=Dataset.from_list(chats),
        args=GRPOConfig(output_dir=directory, **trl_settings(case)),
        callbacks=[Waiter()],
    )
    trainer.train()


def trl_settings(case: Case) -> dict[str, Any]:
    """slime's algorithm in TRL's words, and nothing that costs time without need."""
    samples = NUM_PROMPTS * NUM_SAMPLES
    algorithm: dict[str, Any] = {
        "num_generations": NUM_SAMPLES,
        "generation_batch_size": samples,
        "per_device_train_batch_size": case.trl_micro_batch,
        "gradient_accumulation_steps": samples // case.trl_micro_batch,
        "max_completion_length": case.max_tokens,
        "temperature": 1.0,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "dapo",  # the mean over all tokens
        "scale_rewards": "group",
        "max_steps": 1 + case.warmup_rounds + case.rounds,
        "shuffle_dataset": False,
        "optim": "adamw_torch_fused",
        "learning_rate": case.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    }
    speed: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return algorithm | speed


def grade(response: str, label: str) -> float:
    """What the math plugin gives a response."""
    from slime_rm_math import is_right

    return float(is_right(response, label))


def main() -> None:
    """Train the case of the command line."""
    case, gate = Case(**json.loads(sys.argv[1])), Connection(int(sys.argv[2]))
    with tempfile.TemporaryDirectory() as directory:
        train_with_trl(case, gate, directory)


if __name__ == "__main__":
    main()
