"""The embedded engine's routes that replace, name and check weights; answers have the shape SGLang 0.5.23 gives."""

from __future__ import annotations

import asyncio
from typing import Any, TypeGuard

import orjson
import xxhash
from aiohttp import web

from slime_core.engines.embedded.answers import json_object, reply
from slime_core.engines.embedded.engine import Engine
from slime_core.engines.embedded.mapped_file import MappedFile
from slime_core.engines.embedded.request import BadRequest
from slime_core.engines.embedded.weight_session import WeightSession
from slime_core.engines.embedded.weights import WeightUpdateError, read_checkpoint

CAPABILITIES = {
    "update_weights_from_disk": True,
    "update_weights_from_tensor": False,
    "update_weights_from_distributed": True,
    "begin_weight_update": True,
    "weights_checker": True,
    "unfused_checksums": True,
}
GROUP_FIELDS = {
    "master_address": str,
    "master_port": int,
    "rank_offset": int,
    "world_size": int,
    "group_name": str,
    "backend": str,
}


class WeightRoutes:
    """Handlers for one engine's weights."""

    def __init__(self, engine: Engine, path: str) -> None:
        self.path = path
        """The directory that the weights in use came from last."""
        self._engine = engine
        self._session = WeightSession()
        self._mapped = MappedFile()

    # -- whole -----------------------------------------------------------------------------------------------------
    async def from_disk(self, http: web.Request) -> web.Response:
        """Read and verify a checkpoint, then swap it in when that is safe; a bad one changes nothing."""
        body = await json_object(http)
        path, version = body.get("model_path"), _version(body)
        if not isinstance(path, str):
            raise BadRequest("model_path must be a string.")
        if body.get("load_format") not in (None, "auto", "safetensors"):
            raise BadRequest(f"load_format {body['load_format']!r} is not supported; use 'auto' or 'safetensors'.")
        try:
            # reading takes long: neither the event loop nor the model waits for it
            tensors = await asyncio.to_thread(read_checkpoint, path, self._mapped)
            await self._swap(tensors, version, bool(body.get("abort_all_requests")))
        except WeightUpdateError as error:
            return _refused(error, {"num_paused_requests": 0})
        self.path = path
        return _updated("Succeeded to update model weights.", version, {"num_paused_requests": 0})

    async def from_tensor(self, http: web.Request) -> web.Response:
        """Refused: its tensors come pickled, and unpickling runs whatever the sender wrote."""
        return _refused(
            "the embedded engine does not unpickle tensors; use /update_weights_from_disk or "
            "/update_weights_from_distributed"
        )

    # -- in parts, by broadcast ------------------------------------------------------------------------------------
    async def init_group(self, http: web.Request) -> web.Response:
        """Meet the sender's group."""
        body = await json_object(http)
        for name, kind in GROUP_FIELDS.items():
            if type(body.get(name)) is not kind:
                raise BadRequest(f"{name} must be of type {kind.__name__}, got {body.get(name)!r}.")
        try:
            await self._session.join(
                body["master_address"],
                body["master_port"],
                body["rank_offset"],
                body["world_size"],
                body["group_name"],
                body["backend"],
            )
        except WeightUpdateError as error:
            return _refused(error)
        return reply({"success": True, "message": "Succeeded to initialize custom process group."})

    async def destroy_group(self, http: web.Request) -> web.Response:
        """Leave the sender's group."""
        name = (await json_object(http)).get("group_name")
        try:
            self._session.leave(str(name))
        except WeightUpdateError as error:
            return _refused(error)
        return reply({"success": True, "message": "Succeeded to destroy custom process group."})

    async def begin(self, http: web.Request) -> web.Response:
        """Open an update in parts."""
        await json_object(http)
        try:
            self._session.begin()
        except WeightUpdateError as error:
            return _refused(error)
        return reply({"success": True, "message": "Success"})

    async def from_distributed(self, http: web.Request) -> web.Response:
        """Receive some tensors of the update by broadcast."""
        body = await json_object(http)
        names, dtypes, shapes = (body.get(key) for key in ("names", "dtypes", "shapes"))
        version, load_format = _version(body), body.get("load_format")
        if not (_is_strings(names) and _is_strings(dtypes) and _is_shapes(shapes)):
            raise BadRequest("names and dtypes must be lists of strings, shapes a list of lists of sizes.")
        if not len(names) == len(dtypes) == len(shapes):
            raise BadRequest("names, dtypes and shapes must be of the same length.")
        if load_format not in (None, "flattened_bucket"):
            raise BadRequest(f"load_format {load_format!r} is not supported; use null or 'flattened_bucket'.")
        group = str(body.get("group_name", "weight_update_group"))
        try:
            await self._session.receive(names, dtypes, shapes, group, flat=load_format is not None)
        except WeightUpdateError as error:
            return _refused(error)
        self._session.name_version(version)
        return _updated("Succeeded to update parameter online.", version)

    async def end(self, http: web.Request) -> web.Response:
        """Swap in what the update brought, if it is whole; otherwise the old weights stay."""
        await json_object(http)
        try:
            tensors, version = self._session.end()
            if tensors:
                await self._swap(tensors, version)
        except WeightUpdateError as error:
            return _refused(error)
        return reply({"success": True, "message": "Success"})

    async def _swap(self, tensors: dict[str, Any], version: str | None, abort_all: bool = False) -> None:
        swapped = await asyncio.to_thread(self._engine.replace_weights, tensors, version, abort_all)
        await asyncio.wrap_future(swapped)

    # -- names and checks ------------------------------------------------------------------------------------------
    async def checker(self, http: web.Request) -> web.Response:
        """Checksums of the live weights under their Hugging Face names."""
        action = (await json_object(http)).get("action")
        if action != "checksum":
            raise BadRequest(f"action must be 'checksum', got {action!r}.")
        checksums = await asyncio.wrap_future(self._engine.checksums())
        whole = xxhash.xxh3_128_hexdigest(orjson.dumps(sorted(checksums.items())))
        place = {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
        rank = {
            "checksums": checksums,
            "per_gpu_checksum": whole,
            "parallelism_info": [place | {"rank": 0, "size": 1}],
        }
        return reply({"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": whole})

    async def version(self, http: web.Request) -> web.Response:
        """The name of the weights in use."""
        return reply({"weight_version": self._engine.weight_version})

    async def rename(self, http: web.Request) -> web.Response:
        """Rename the weights in use."""
        body = await json_object(http)
        version = body.get("new_version")
        if not isinstance(version, str):
            raise BadRequest("new_version must be a string.")
        await asyncio.wrap_future(self._engine.set_weight_version(version, bool(body.get("abort_all_requests"))))
        return reply({"success": True, "message": f"Weight version updated to {version}", "new_version": version})


def _version(body: dict[str, Any]) -> str | None:
    version = body.get("weight_version")
    if version is not None and not isinstance(version, str):
        raise BadRequest("weight_version must be a string or null.")
    return version


def _is_strings(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_shapes(value: Any) -> TypeGuard[list[list[int]]]:
    return isinstance(value, list) and all(
        isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape) for shape in value
    )


def _updated(message: str, version: str | None, more: dict[str, Any] | None = None) -> web.Response:
    named = "" if version is None else f" Weight version updated to {version}."
    return reply({"success": True, "message": message + named} | (more or {}))


def _refused(reason: object, more: dict[str, Any] | None = None) -> web.Response:
    return reply({"success": False, "message": str(reason)} | (more or {}), status=400)
