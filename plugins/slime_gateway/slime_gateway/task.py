"""What an agent is given: the row to work on, and where the model listens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """One rollout of one prompt; the model answers under `base_url` to whoever has `api_key`."""

    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    base_url: str
    """For an OpenAI client, `/v1` included."""
    api_key: str
    """Of this rollout alone."""
    group_index: int = -1
    """Rollouts of one prompt share it."""
    index: int = -1
    """Number of the rollout in the run."""
    evaluation: bool = False

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as chat messages, a new list."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else list(self.prompt)

    @property
    def anthropic_base_url(self) -> str:
        """For an Anthropic client, which adds `/v1` itself."""
        return self.base_url.removesuffix("/v1")

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, where label and metadata are."""
        return asdict(self)
