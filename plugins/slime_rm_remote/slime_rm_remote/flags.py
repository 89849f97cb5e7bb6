"""The flags that both rewards share, and the service that they describe."""

from __future__ import annotations

import argparse
import json
from typing import Any

from slime_core import OptionError, flag_types
from slime_rm_remote.service import Service, ServiceOptions, auth_headers


def add_service_options(parser: argparse._ArgumentGroup, plugin: str) -> None:
    """`--<plugin>-deadline-s`, `-concurrency`, `-rate-limit`, `-auth-env`, `-auth-header`."""
    parser.add_argument(
        f"--{plugin}-deadline-s",
        type=flag_types.positive,
        metavar="S",
        help="for one request, waiting and retries included (default: nine tenths of --reward-timeout-s)",
    )
    parser.add_argument(
        f"--{plugin}-concurrency",
        type=flag_types.positive_int,
        default=64,
        metavar="N",
        help="requests under way at once (default: 64)",
    )
    parser.add_argument(f"--{plugin}-rate-limit", type=flag_types.positive, metavar="N", help="requests a second")
    parser.add_argument(
        f"--{plugin}-auth-env", metavar="VAR", help="environment variable that holds the token or key, sent as a header"
    )
    parser.add_argument(
        f"--{plugin}-auth-header",
        default="Authorization",
        metavar="NAME",
        help="the header's name (default: Authorization, with the scheme Bearer)",
    )


def service(args: argparse.Namespace, plugin: str, url: str) -> Service:
    """The service at `url` under the flags of `add_service_options`.

    Raises:
        OptionError: when the flags cannot work.
    """

    def option(name: str) -> Any:
        return getattr(args, f"{plugin}_{name}".replace("-", "_"))

    deadline_s = option("deadline_s") or 0.9 * args.reward_timeout_s
    if deadline_s > args.reward_timeout_s:
        raise OptionError(
            f"--{plugin}-deadline-s {deadline_s:g} is above --reward-timeout-s {args.reward_timeout_s:g}, after which "
            "every reward is cancelled; raise that one too."
        )
    headers = auth_headers(option("auth_env"), option("auth_header"), f"--{plugin}-auth-env")
    return Service(ServiceOptions(url, deadline_s, option("concurrency"), option("rate_limit"), headers))


def http_url(text: str) -> str:
    """A flag's URL."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"'{text}' is not a URL; it must begin with http:// or https://")
    return text.rstrip("/")


def json_object(text: str) -> dict[str, Any]:
    """A flag's JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"'{text}' is not a JSON object")
    return value
