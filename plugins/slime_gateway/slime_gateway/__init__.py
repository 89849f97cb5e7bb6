"""`--generate gateway`: agents talk OpenAI or Anthropic to a local server, and what they do becomes samples."""

from slime_gateway.task import Task

__all__ = ["Task"]
