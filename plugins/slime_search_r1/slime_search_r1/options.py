"""The plugin's flags."""

from __future__ import annotations

import argparse

from slime_core import flag_types

PLAIN_DOCUMENT = "Doc {number}(Title: {title}) {text}"


def add_options(parser: argparse._ArgumentGroup) -> None:
    """Those of the generator, its search, and the reward."""
    parser.add_argument(
        "--search-r1-max-turns", type=flag_types.positive_int, default=4, metavar="N", help="turns of the model"
    )
    parser.add_argument(
        "--search-r1-max-information-tokens",
        type=flag_types.positive_int,
        default=500,
        metavar="N",
        help="tokens shown for a search",
    )
    parser.add_argument(
        "--search-r1-document-format",
        type=document_format,
        default=PLAIN_DOCUMENT,
        metavar="TEXT",
        help="how a document is shown, with {number}, {title} and {text}",
    )
    parser.add_argument(
        "--search-r1-num-results", type=flag_types.positive_int, default=3, metavar="N", help="documents a search"
    )
    parser.add_argument(
        "--search-r1-backend",
        choices=["bm25", "dense", "http", "web"],
        default="bm25",
        help="a local corpus by words or by embeddings, a retrieval server, a web search (key in SERPER_API_KEY)",
    )
    add_index_options(parser, "--search-r1-")
    parser.add_argument("--search-r1-url", metavar="URL", help="of the retrieval server, or of another web search")
    parser.add_argument(
        "--search-r1-concurrency", type=flag_types.positive_int, default=64, metavar="N", help="searches at once"
    )
    parser.add_argument(
        "--search-r1-timeout-s", type=flag_types.positive, default=10.0, metavar="S", help="for one search"
    )
    parser.add_argument(
        "--search-r1-cache-size", type=flag_types.positive_int, default=10_000, metavar="N", help="queries kept"
    )
    for part, weight in (("em", 1.0), ("f1", 0.0), ("format", 0.0)):
        parser.add_argument(
            f"--search-r1-{part}-weight", type=float, default=weight, metavar="W", help=f"of {part} in the reward"
        )


def add_index_options(parser: argparse._ActionsContainer, prefix: str) -> None:
    """What a local index is made of; `slime-search` has the same options."""
    parser.add_argument(f"{prefix}corpus", metavar="FILE", help="JSONL or Parquet rows to search")
    parser.add_argument(f"{prefix}index", metavar="DIR", help="where its index is kept; by default beside the corpus")
    parser.add_argument(f"{prefix}embedding-model", metavar="NAME", help="sentence-transformers model, for dense")
    parser.add_argument(f"{prefix}query-prefix", default="", metavar="TEXT", help="before a query, for dense")
    parser.add_argument(f"{prefix}document-prefix", default="", metavar="TEXT", help="before a document, for dense")


def document_format(text: str) -> str:
    """A template that can be filled."""
    try:
        shown = text.format(number=1, title="t", text="the text")
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise argparse.ArgumentTypeError(
            f"'{text}' knows {{number}}, {{title}} and {{text}} only ({error!r})"
        ) from None
    if "the text" not in shown:
        raise argparse.ArgumentTypeError(f"'{text}' does not show {{text}}")
    return text
