"""What servers say of themselves, and what a run makes of it for engines that somebody else has started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.engines.connect import connect
from slime_core.engines.process import LOOPBACK, free_port
from slime_core.engines.server import EngineServer
from slime_core.engines.topology import ask_topology, parse_topology
from slime_core.errors import EngineError
from slime_core.options import parse

CAPTURES = Path(__file__).parent / "captures"


def captured(name: str) -> dict:
    return json.loads((CAPTURES / f"{name}.json").read_text())["response"]


@pytest.mark.parametrize(("name", "version"), [("server_info", "0.5.23"), ("server_info_0.5.9", "0.5.9")])
def test_sglangs_answer_is_understood(name, version):
    found = parse_topology(captured(name))
    assert found.version == version
    assert (found.tensor_parallel, found.pipeline_parallel, found.data_parallel) == (1, 1, 1)
    assert (found.max_requests, found.context_tokens) == (128, 4090)
    assert (found.role, found.bootstrap_port, found.embeds) == ("regular", None, False)


def test_parts_in_disaggregation_are_told():
    info = captured("server_info")
    assert parse_topology(info | {"disaggregation_mode": "prefill"}).bootstrap_port == 8998
    decoding = parse_topology(info | {"disaggregation_mode": "decode"})
    assert (decoding.role, decoding.bootstrap_port) == ("decode", None)


@pytest.mark.parametrize("info", [{}, {"version": "1"}, [], captured("server_info") | {"tp_size": "many"}])
def test_another_answer_is_refused(info):
    with pytest.raises(EngineError, match="/server_info is not SGLang's"):
        parse_topology(info)


def test_nobody_there_is_named():
    url = f"http://{LOOPBACK}:{free_port()}"
    with pytest.raises(EngineError, match=f"{url} does not say what it is"):
        ask_topology(url)


async def test_the_client_sends_external_engines_what_they_take(server):
    words = ["--model", server.model_dir, "--external-engines", server.url, "--engine-max-requests", "7"]
    found = ask_topology(server.url)
    async with connect(parse(words).args, server.url, [server.url]) as client:
        assert client._slots._value == found.max_requests != 7
        assert client.context_tokens == found.context_tokens == server.context_length


def test_an_external_server_of_another_kind_is_refused(server, tmp_path):
    """The embedded engine is not SGLang: its version is slime's."""
    args = parse(["--model", server.model_dir, "--engine", "sglang", "--external-engines", server.url]).args
    with pytest.raises(EngineError, match=r"SGLang .* is too old; --engine sglang needs 0\.5\.9"):
        EngineServer(args, 0, tmp_path, 1).start()


def test_an_external_server_that_is_gone_for_a_moment_has_lost_its_weights(server, tmp_path):
    """One that is started again answers before it could count as ill, with the weights of its checkpoint."""
    args = parse(["--model", server.model_dir, "--external-engines", server.url]).args
    engine = EngineServer(args, 0, tmp_path, 1)
    engine.start()
    engine.check(at_once=True)
    engine._url = f"http://{LOOPBACK}:{free_port()}"
    with pytest.raises(EngineError, match="engine 0 has gone: nobody listens at"):
        engine.check(at_once=True)
