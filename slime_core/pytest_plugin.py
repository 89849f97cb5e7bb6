"""For authors, in every pytest run: `--slime-check NAME`, or `slime_check` in the configuration, adds a test.

The test checks a plugin against the whole contract, as `slime plugins check` does:

    # pyproject.toml
    [tool.pytest.ini_options]
    slime_check = ["my_reward --my-reward-bonus 0.5"]
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The flag and the configuration's key."""
    what = "check this slime plugin against the hook contract; flags of slime train that it needs may follow the name"
    parser.getgroup("slime").addoption(
        "--slime-check", action="append", default=[], metavar="'NAME [FLAG...]'", help=what
    )
    parser.addini("slime_check", what, type="linelist", default=[])


@pytest.hookimpl(tryfirst=True)  # so that -k and -m see the tests
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for every plugin named."""
    if config.getini("slime_check") or config.getoption("slime_check"):
        plugins: pytest.Collector = Contracts.from_parent(session, name="slime", nodeid="slime")
        report = config.hook.pytest_make_collect_report(collector=plugins)
        config.hook.pytest_collectreport(report=report)
        items.extend(report.result)


class Contracts(pytest.Collector):
    """The plugins named by the flag and the configuration."""

    def collect(self) -> Iterator[pytest.Item]:
        """A test a plugin."""
        wanted: list[str] = [*self.config.getini("slime_check"), *self.config.getoption("slime_check")]
        for line in dict.fromkeys(wanted):
            reference, *flags = shlex.split(line)
            yield ContractItem.from_parent(self, name=reference, reference=reference, flags=flags)


class ContractItem(pytest.Item):
    """Checks one plugin."""

    def __init__(self, *, reference: str, flags: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reference = reference
        self.flags = flags

    def runtest(self) -> None:
        """Run the check; what could not be found out is a section of the report."""
        from slime_core.contract import check

        findings = check(self.reference, self.flags)
        self.add_report_section("call", "contract", "\n".join(map(str, findings)))
        if any(finding.is_problem for finding in findings):
            raise ContractBroken("\n".join(map(str, findings)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The findings; a traceback only for a fault of the check itself."""
        if isinstance(excinfo.value, ContractBroken):
            return f"slime plugins check {self.reference}\n{excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """What the report calls the test."""
        return self.path, None, f"the contract of plugin {self.reference}"


class ContractBroken(Exception):
    """The plugin has problems."""
