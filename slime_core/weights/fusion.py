"""SGLang's checksums of the weights it was sent: it fuses some parameters and hashes the fused ones."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter

import torch

from slime_core.weights.source import NamedTensors

FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Hugging Face's part of a name -> SGLang's, and where its rows lie there (Llama, Qwen2, Qwen3, Mistral, Gemma)."""
STACKED = {
    "gate_proj": ("w13_weight", 0),
    "up_proj": ("w13_weight", 1),
    "down_proj": ("w2_weight", 0),
    "w1": ("w13_weight", 0),
    "w3": ("w13_weight", 1),
    "w2": ("w2_weight", 0),
}
"""Likewise of an expert's tensors, which lie one expert behind the other (Qwen, GLM 4, DeepSeek; Mixtral)."""
OF_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
VOCAB_MULTIPLE = 64
EXPERTS = ".experts."
PART = re.compile(r"\.(?P<part>q_proj|k_proj|v_proj|gate_proj|up_proj)\.")
EXPERT = re.compile(r"\.experts\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w3|w2)\.weight$")


def fused_checksums(named_tensors: NamedTensors) -> dict[str, str]:
    """SGLang's name -> the first 16 hex digits of SHA-256 over the bytes, as a server on CPU computes them."""
    placed: dict[str, list[tuple[tuple[int, int], torch.Tensor]]] = defaultdict(list)
    for name, tensor in named_tensors:
        whole, place = _place(name)
        placed[whole].append((place, tensor))
    parts = {whole: [tensor for _, tensor in sorted(some, key=itemgetter(0))] for whole, some in placed.items()}
    for name, tensors in parts.items():
        tensors += _padding(name, tensors[0])
    # hashing gives up the interpreter's lock
    with ThreadPoolExecutor() as pool:
        return dict(zip(parts, pool.map(_checksum, parts.values()), strict=True))


def comparable(sent: Mapping[str, str], used: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What was sent and what the server names, without what has no counterpart.

    That may be a tied output layer, and experts, which some models' servers stack in ways of their own: the effect of
    those shows in a prompt alone.
    """
    of_sent = {n: c for n, c in sent.items() if n in used or not (n.endswith("lm_head.weight") or EXPERTS in n)}
    return of_sent, {name: checksum for name, checksum in used.items() if name in sent or EXPERTS not in name}


def _place(name: str) -> tuple[str, tuple[int, int]]:
    """SGLang's name of the parameter that holds a tensor, and the tensor's place in it: expert, part."""
    if (found := EXPERT.search(name)) is not None:
        whole, position = STACKED[found["part"]]
        return f"{name[: found.start()]}{EXPERTS}{whole}", (int(found["number"]), position)
    if (found := PART.search(name)) is not None:
        whole, position = FUSED[found["part"]]
        return name.replace(found["part"], whole), (0, position)
    return name, (0, 0)


def _padding(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """SGLang rounds the vocabulary up and leaves the rows behind it zero."""
    missing = -tensor.shape[0] % VOCAB_MULTIPLE if name.endswith(OF_VOCABULARY) else 0
    return [tensor.new_zeros((missing, *tensor.shape[1:]))] if missing else []


def _checksum(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
