"""Whatever an engine does, who talks to it gets an error that names it."""

from __future__ import annotations

import pytest

from slime_core.engines.admin import EngineAdmin, Refused
from slime_core.engines.process import LOOPBACK, free_port
from slime_core.errors import EngineError

CALLS = {
    "server_infos": (),
    "checksums": (),
    "pause": ("abort",),
    "prompt_logprobs": ([1, 2],),
    "update_weights_from_disk": ("nowhere", 1),
}


@pytest.mark.parametrize("name", CALLS)
async def test_an_engine_that_is_gone_is_named(name):
    url = f"http://{LOOPBACK}:{free_port()}"
    async with EngineAdmin([url], 5) as admin:
        with pytest.raises(EngineError, match=f"{url}/.* did not answer"):
            await getattr(admin, name)(*CALLS[name])


async def test_an_engine_that_refuses_is_quoted(server):
    async with EngineAdmin([server.url], 30) as admin:
        with pytest.raises(Refused, match=r"update_weights_from_disk answered HTTP 400: .*nowhere") as caught:
            await admin.update_weights_from_disk("nowhere", 1)
    assert caught.value.status == 400
