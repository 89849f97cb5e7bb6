"""The texts that the loose mode of IFEval grades (Zhou et al. 2023, section 2.2)."""

from __future__ import annotations


def variants(response: str) -> list[str]:
    """The response, without its first line, its last line, both; each also without asterisks."""
    lines = response.split("\n")
    cuts = [lines, lines[1:], lines[:-1], lines[1:-1]]
    texts = ["\n".join(cut).strip() for cut in cuts]
    texts[0] = response
    return [*texts, *(text.replace("*", "") for text in texts)]
