"""`slime-search serve`, run as its user would, and asked by the plugin's own client."""

import asyncio
import re
import subprocess
import sys

import aiohttp
import pytest

from slime_search_r1.cli import main
from slime_search_r1.documents import Document
from slime_search_r1.http import RetrievalServer, SearchError

COMMAND = [sys.executable, "-c", "from slime_search_r1.cli import main; raise SystemExit(main())"]


@pytest.fixture
def url(corpus_file):
    command = [*COMMAND, "serve", "--corpus", str(corpus_file), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            first = server.stdout.readline()
            yield re.search(r"http://127\.0\.0\.1:\d+/retrieve", first)[0]
        finally:
            server.terminate()


async def test_the_served_index_answers_the_plugin(url):
    client = RetrievalServer(url, {}, trust_env=False)
    found = await asyncio.gather(*(client.search(query, 1) for query in ("tea", "pen", "zebra")))
    client.close()
    texts = [[hit.document for hit in hits] for hits in found]
    assert texts == [[Document("tea", "kettle")], [Document("ink", "pen")], []]
    assert found[0][0].score > 0


async def test_the_service_speaks_search_r1_s_protocol_and_refuses_what_is_not(url):
    bad = [
        *([], {}, {"queries": "tea"}, {"queries": [1]}, {"queries": ["x"] * 1025}),
        *({"queries": ["x"], "topk": 0}, {"queries": ["x"], "topk": True}, {"queries": ["x"], "return_scores": 1}),
    ]
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json={"queries": ["tea", "ink"], "topk": 1, "return_scores": True}) as answer:
            result = (await answer.json())["result"]
            assert [[entry["document"]["contents"] for entry in hits] for hits in result] == [
                ['"tea"\nkettle'],
                ['"ink"\npen'],
            ]
        async with session.post(url, json={"queries": ["tea"]}) as answer:
            assert (await answer.json())["result"] == [
                [{"title": "tea", "text": "kettle", "contents": '"tea"\nkettle'}]
            ]
        for body in bad:
            async with session.post(url, json=body) as answer:
                assert answer.status == 400 and (await answer.json())["error"]
        async with session.post(url, data=b"\xff{") as answer:
            assert answer.status == 400
        async with session.get(url.replace("retrieve", "health")) as answer:
            assert (await answer.json())["num_documents"] == 2


async def test_a_refusal_reaches_the_asker_as_it_was_said(url):
    client = RetrievalServer(url, {}, trust_env=False)
    with pytest.raises(SearchError, match=r"HTTP 400.*topk"):
        await client.search("tea", 0)
    client.close()


def test_the_index_is_built_and_asked_on_the_command_line(corpus_file, capsys):
    assert main(["build", "--corpus", str(corpus_file)]) == 0
    assert main(["ask", "pen", "--corpus", str(corpus_file)]) == 0
    assert capsys.readouterr().out == "2 documents\nDoc 1(Title: ink) pen\n"


def test_a_user_s_mistake_is_one_line(capsys):
    assert main(["serve", "--corpus", "/nowhere.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("error: --corpus /nowhere.jsonl")
