"""SGLang's checksums of the weights it was sent: it fuses some parameters and hashes the fused ones."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor

import torch

from slime_core.weights.source import NamedTensors

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""SGLang's parameter -> the Hugging Face ones whose rows it holds, in order (Llama, Qwen2, Qwen3, Mistral, Gemma)."""
OF_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
VOCAB_MULTIPLE = 64
PART = re.compile(r"\.(?P<part>q_proj|k_proj|v_proj|gate_proj|up_proj)\.")
WHOLE = {part: whole for whole, parts in FUSED.items() for part in parts}


def fused_checksums(named_tensors: NamedTensors) -> dict[str, str]:
    """SGLang's name -> the first 16 hex digits of SHA-256 over the bytes, as a server on CPU computes them."""
    given = dict(named_tensors)
    parts: dict[str, list[torch.Tensor]] = {}
    for name in filter(hashed, given):
        found = PART.search(name)
        whole = name if found is None else name.replace(found["part"], WHOLE[found["part"]])
        if whole not in parts:
            tensors = [given[part] for part in _parts(name, given.keys())]
            parts[whole] = tensors + _padding(name, tensors[0])
    # hashing gives up the interpreter's lock
    with ThreadPoolExecutor() as pool:
        return dict(zip(parts, pool.map(_checksum, parts.values()), strict=True))


def hashed(name: str) -> bool:
    """Whether a tensor is compared: SGLang stacks experts in its own way, and their effect shows in a prompt alone."""
    return ".experts." not in name


def comparable(sent: Mapping[str, str], used: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What was sent and what the server names, without what has no counterpart: experts, a tied output layer."""
    of_sent = {name: checksum for name, checksum in sent.items() if name in used or not name.endswith("lm_head.weight")}
    return of_sent, {name: checksum for name, checksum in used.items() if hashed(name)}


def _parts(name: str, names: Set[str]) -> list[str]:
    found = PART.search(name)
    if found is None:
        return [name]
    parts = [name.replace(found["part"], part) for part in FUSED[WHOLE[found["part"]]]]
    return [part for part in parts if part in names]


def _padding(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """SGLang rounds the vocabulary up and leaves the rows behind it zero."""
    missing = -tensor.shape[0] % VOCAB_MULTIPLE if name.endswith(OF_VOCABULARY) else 0
    return [tensor.new_zeros((missing, *tensor.shape[1:]))] if missing else []


def _checksum(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
