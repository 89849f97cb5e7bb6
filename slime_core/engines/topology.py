"""What a running server says of itself: its version, its ranks, its part in disaggregation, how much it takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from slime_core.engines.process import DIRECT
from slime_core.errors import EngineError

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Topology:
    """Read from /server_info; what an older server does not tell has the value of a plain one."""

    version: str
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    copies: int
    """That answer requests: of the whole model, or with data-parallel attention of that alone."""
    max_requests: int
    """That it runs at once, over all copies."""
    context_tokens: int | None
    """Prompt and response together; None when it does not say."""
    role: str
    """`prefill`, `decode`, or `regular` for one that does both."""
    bootstrap_port: int | None
    """Where decoding engines find a prefilling one."""
    embeds: bool
    """Whether it gives embeddings and not text."""


def parse_topology(info: dict[str, Any]) -> Topology:
    """A server's answer to /server_info.

    Raises:
        EngineError: when it is not SGLang's.
    """
    try:
        mode = info.get("disaggregation_mode", "null")
        role = "regular" if mode == "null" else str(mode)
        longest = info.get("max_req_input_len")
        return Topology(
            version=str(info["version"]),
            tensor_parallel=int(info["tp_size"]),
            pipeline_parallel=int(info["pp_size"]),
            data_parallel=int(info["dp_size"]),
            copies=int(info["dp_size"]) * int(info.get("attn_dp_size", 1)),
            max_requests=int(info.get("max_running_requests") or 0),
            context_tokens=int(info["context_length"]) if info.get("context_length") else longest,
            role=role,
            bootstrap_port=int(info["disaggregation_bootstrap_port"]) if role == "prefill" else None,
            embeds=bool(info.get("is_embedding", False)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"its /server_info is not SGLang's: {type(error).__name__}: {error}") from None


def ask_topology(url: str) -> Topology:
    """What the server at `url` says of itself.

    Raises:
        EngineError: when it does not answer, or not as SGLang does.
    """
    try:
        with DIRECT.open(f"{url}/server_info", timeout=TIMEOUT_S) as answer:
            return parse_topology(json.loads(answer.read()))
    except (OSError, ValueError) as error:
        raise EngineError(f"{url} does not say what it is: {error}") from None
    except EngineError as error:
        raise EngineError(f"{url}: {error}") from None
