"""Models beside the policy that do not train: the reference of KL terms, and the teacher of a distillation."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from slime_core.errors import OptionError
from slime_core.options import needs_reference
from slime_core.training.torch_backend import checkpoint
from slime_core.training.torch_backend.model import Policy, load_policy

REFERENCE = "reference"
"""Directory of a checkpoint with a reference that is renewed in the run."""


class Frozen:
    """The reference and the teacher, each None where no option asks for it."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        """Load what the options ask for.

        Raises:
            OptionError: when a model has another vocabulary than `--model`.
        """
        self._args = args
        self.reference: Policy | None = None
        self.teacher: Policy | None = None
        if needs_reference(args):
            self.reference = _load(args, "--ref-model", args.ref_model, device)
        if args.teacher_model is not None:
            self.teacher = _load(args, "--teacher-model", args.teacher_model, device)

    def renew_reference(self, model: PreTrainedModel) -> None:
        """Make the policy's present weights the reference's."""
        if self.reference is not None:
            self.reference.model.load_state_dict(model.state_dict())

    def save(self, directory: Path) -> None:
        """Write the reference where it is not that of the options any more."""
        if self.reference is not None and self._args.ref_update_interval is not None:
            checkpoint.save_model(self.reference.model, Path(self._args.model), directory / REFERENCE)

    def load(self, directory: Path) -> None:
        """Go on with the reference that `save` wrote, if it wrote one."""
        if self.reference is not None and (directory / REFERENCE).is_dir():
            checkpoint.load_model(self.reference.model, directory / REFERENCE)


def _load(args: argparse.Namespace, flag: str, directory: str | None, device: torch.device) -> Policy:
    if directory is not None and _vocabulary(directory) != _vocabulary(args.model):
        raise OptionError(
            f"{flag} {directory} has another vocabulary than --model {args.model}; log-probabilities of the same "
            "tokens can only be compared between models that share a tokenizer."
        )
    policy = load_policy(args, device, directory)
    policy.model.requires_grad_(False)
    return policy


def _vocabulary(directory: str) -> dict[str, int]:
    known: dict[str, int] = AutoTokenizer.from_pretrained(directory, trust_remote_code=False).get_vocab()
    return known
