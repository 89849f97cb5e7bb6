"""The question that a judge is asked."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import SandboxedEnvironment

from slime_core import OptionError, Sample

END_OF_THINKING = "</think>"
VARIABLES = {"prompt", "response", "answer", "label", "metadata", "min_score", "max_score"}


class JudgeTemplate:
    """A Jinja template, run in Jinja's sandbox."""

    def __init__(self, path: str | None, min_score: float, max_score: float) -> None:
        environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
        source = _packaged() if path is None else _read(path)
        try:
            unknown = meta.find_undeclared_variables(environment.parse(source)) - VARIABLES
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise OptionError(f"--judge-template {path}: {error}") from None
        if unknown:
            raise OptionError(
                f"--judge-template {path} uses {', '.join(sorted(unknown))}; a template sees "
                f"{', '.join(sorted(VARIABLES))}."
            )
        self._scores = {"min_score": f"{min_score:g}", "max_score": f"{max_score:g}"}

    def render(self, sample: Sample) -> str:
        """The question about this sample; chat messages become paragraphs `role: content`."""
        return self._template.render(
            prompt=prompt_text(sample),
            response=sample.response,
            answer=sample.response.rpartition(END_OF_THINKING)[2].strip(),
            label=sample.label,
            metadata=sample.metadata,
            **self._scores,
        )


def prompt_text(sample: Sample) -> str:
    """The prompt as text."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in sample.prompt)


def _packaged() -> str:
    return (resources.files("slime_rm_remote") / "judge.jinja").read_text(encoding="utf-8")


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--judge-template: {path} cannot be read: {error}") from None
