"""A client for the engines of one model, with what it reads of that model's directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime_core.engines.client import EngineClient
from slime_core.engines.model_dir import context_length, load_tokenizer
from slime_core.options import Options


def connect(
    args: Options, router_url: str, worker_urls: Sequence[str], frozen: Mapping[str, EngineClient] | None = None
) -> EngineClient:
    """A client that asks the router, with as many requests under way as the engines run at once.

    Args:
        frozen: the clients of the frozen models, by name.

    Raises:
        OptionError: when the model has no tokenizer that loads.
    """
    return EngineClient(
        router_url,
        tokenizer=load_tokenizer(args.model),
        concurrency=max(1, args.engine_max_requests * len(worker_urls)),
        timeout_s=args.request_timeout_s,
        worker_urls=worker_urls,
        context_tokens=args.max_context_tokens or context_length(args.model),
        frozen=frozen,
    )
