import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from slime_core.testing import make_options
from slime_search_r1 import SearchR1

ROWS = [{"title": "tea", "text": "kettle"}, {"title": "ink", "text": "pen"}]


@pytest.fixture
def write_corpus(tmp_path):
    """`write_corpus(rows)` -> a JSONL file."""

    def write(rows=ROWS, name="corpus.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def corpus_file(write_corpus):
    return write_corpus()


@pytest.fixture
def make_plugin():
    """`make_plugin(*flags)` -> the plugin as a run would start it; a document is shown as its text alone."""
    made = []

    def make(*flags) -> SearchR1:
        args = make_options(
            "--generate", "search_r1", "--search-r1-document-format", "{text}", *(str(flag) for flag in flags)
        )
        plugin = SearchR1(args)
        plugin.configure(args)
        made.append(plugin)
        return plugin

    yield make
    for plugin in made:
        plugin.close()


@pytest.fixture
def serve():
    """`async with serve(handler) as url`: a service whose every POST the handler answers."""

    @asynccontextmanager
    async def served(handler):
        app = web.Application()
        app.router.add_post("/search", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/search"
        finally:
            await runner.cleanup()

    return served
