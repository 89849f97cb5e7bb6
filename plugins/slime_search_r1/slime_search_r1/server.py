"""A local index over HTTP, in Search-R1's protocol: POST /retrieve, GET /health."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from slime_search_r1.local import Hit, LocalIndex

INDEX = web.AppKey("index", LocalIndex)
SLOTS = web.AppKey("slots", asyncio.Semaphore)
MOST_QUERIES, MOST_RESULTS, LONGEST_QUERY = 1024, 1000, 10_000
"""In one request; characters."""


def make_app(index: LocalIndex, *, concurrency: int, num_results: int) -> web.Application:
    """The service.

    Args:
        concurrency: queries that are searched at once, a thread each.
        num_results: documents a query where the request does not say.
    """

    async def retrieve(request: web.Request) -> web.Response:
        try:
            asked = await request.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            return _refused("the body is not JSON")
        if problem := _problem(asked):
            return _refused(problem)
        topk = asked.get("topk") or num_results
        found = await asyncio.gather(*(_search(request.app, query, topk) for query in asked["queries"]))
        with_scores = asked.get("return_scores", False)
        return web.json_response({"result": [[_entry(hit, with_scores) for hit in hits] for hits in found]})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "num_documents": len(request.app[INDEX].documents)})

    app = web.Application()
    app[INDEX], app[SLOTS] = index, asyncio.Semaphore(concurrency)
    app.router.add_post("/retrieve", retrieve)
    app.router.add_get("/health", health)
    return app


async def _search(app: web.Application, query: str, num_results: int) -> list[Hit]:
    async with app[SLOTS]:
        return await asyncio.to_thread(app[INDEX].search, query, num_results)


def _problem(asked: Any) -> str | None:
    """What is wrong with a request; None when nothing is."""
    if not isinstance(asked, dict) or not isinstance(queries := asked.get("queries"), list):
        return 'the body must be an object with a list "queries"'
    if len(queries) > MOST_QUERIES or not all(isinstance(q, str) and len(q) <= LONGEST_QUERY for q in queries):
        return f'"queries" must be at most {MOST_QUERIES} texts of at most {LONGEST_QUERY} characters'
    topk = asked.get("topk")
    if topk is not None and (not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= MOST_RESULTS):
        return f'"topk" must be a number from 1 to {MOST_RESULTS}'
    return None if isinstance(asked.get("return_scores", False), bool) else '"return_scores" must be true or false'


def _entry(hit: Hit, with_score: bool) -> dict[str, Any]:
    title, text = hit.document
    document = {"title": title, "text": text, "contents": f'"{title}"\n{text}'}
    return {"document": document, "score": hit.score} if with_score else document


def _refused(problem: str) -> web.Response:
    return web.json_response({"error": problem}, status=400)
