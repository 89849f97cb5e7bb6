"""Models beside the policy that do not train: the reference of KL terms, and the teacher of a distillation."""

from __future__ import annotations

import argparse

import torch
from transformers import PreTrainedModel

from slime_core.options import needs_reference
from slime_core.training.model_files import check_vocabulary
from slime_core.training.ranks import Ranks
from slime_core.training.torch_backend.export import named_weights
from slime_core.training.torch_backend.load import load_frozen
from slime_core.training.torch_backend.model import Policy
from slime_core.training.torch_backend.sharding import assign


class Frozen:
    """The reference and the teacher, each None where no option asks for it."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks) -> None:
        """Load what the options ask for.

        Raises:
            OptionError: when a model has another vocabulary than `--model`.
        """
        self._args = args
        self.reference: Policy | None = None
        self.teacher: Policy | None = None
        if needs_reference(args):
            self.reference = _load(args, "--ref-model", args.ref_model, ranks)
        if args.teacher_model is not None:
            self.teacher = _load(args, "--teacher-model", args.teacher_model, ranks)

    def renew_reference(self, model: PreTrainedModel) -> None:
        """Make the policy's present weights the reference's."""
        if self.reference is not None:
            own = self.reference.model.state_dict()
            for name, tensor in named_weights(model, self.reference.dtype):
                assign(own[name], tensor)

    def renewed(self) -> dict[str, torch.Tensor]:
        """The weights of a reference that is not that of the options any more, by name; usually none."""
        if self.reference is None or self._args.ref_update_interval is None:
            return {}
        return {name: p.detach() for name, p in self.reference.model.named_parameters()}


def _load(args: argparse.Namespace, flag: str, directory: str | None, ranks: Ranks) -> Policy:
    check_vocabulary(args, flag, directory)
    return load_frozen(args, ranks, directory or args.model)
