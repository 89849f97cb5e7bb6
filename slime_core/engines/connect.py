"""A client for the engines of one model, with what it reads of that model's directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime_core.engines.client import EngineClient
from slime_core.engines.model_dir import context_length, load_tokenizer
from slime_core.engines.topology import ask_topology
from slime_core.options import Options


def connect(
    args: Options, router_url: str, worker_urls: Sequence[str], frozen: Mapping[str, EngineClient] | None = None
) -> EngineClient:
    """A client that asks the router, with as many requests under way as the engines run at once.

    Of external engines they themselves say how many, and how long a context may be.

    Args:
        frozen: the clients of the frozen models, by name.

    Raises:
        OptionError: when the model has no tokenizer that loads.
        EngineError: when an external engine does not say what it is.
    """
    num_requests = args.engine_max_requests * len(worker_urls)
    limits = [args.max_context_tokens or context_length(args.model)]
    if args.external_engines:  # somebody else has decided how much they take
        found = [ask_topology(url) for url in worker_urls]
        num_requests = sum(topology.max_requests or args.engine_max_requests for topology in found)
        limits += [topology.context_tokens for topology in found if topology.context_tokens is not None]
    return EngineClient(
        router_url,
        tokenizer=load_tokenizer(args.model),
        concurrency=max(1, num_requests),
        timeout_s=args.request_timeout_s,
        worker_urls=worker_urls,
        context_tokens=min(limits),
        frozen=frozen,
    )
