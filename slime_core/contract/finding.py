"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of a check: `state` is `ok`, `PROBLEM`, or `-` for what was not checked."""

    check: str
    state: str
    text: str

    @property
    def is_problem(self) -> bool:
        """Whether the plugin breaks the contract here."""
        return self.state == "PROBLEM"

    def __str__(self) -> str:
        return f"{self.state:<8}{self.check}: {self.text}"


def ok(check: str, text: str) -> Finding:
    """The contract is kept."""
    return Finding(check, "ok", text)


def problem(check: str, text: str) -> Finding:
    """The contract is broken."""
    return Finding(check, "PROBLEM", text)


def unchecked(check: str, text: str) -> Finding:
    """It could not be found out."""
    return Finding(check, "-", text)
