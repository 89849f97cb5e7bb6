"""Weights that leave a GPU: memory opened by another process, and broadcast over NCCL."""

from __future__ import annotations

import base64
import io
import multiprocessing
import pickle

import pytest
import torch
from torch.multiprocessing import reductions

from slime_core.engines.weight_group import WeightGroup, meet_at, meeting_point
from slime_core.weights.tensor import REBUILT_DEVICE, lay_out, serialized

TENSORS = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(5))]
CONTEXT = multiprocessing.get_context("spawn")


def open_by_uuid(*arguments):
    """What SGLang does with torch's handle: it finds the device by its UUID."""
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    place = uuids.index(arguments[REBUILT_DEVICE])
    return reductions.rebuild_cuda_tensor(*arguments[:REBUILT_DEVICE], place, *arguments[REBUILT_DEVICE + 1 :])


class Opener(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        return open_by_uuid if name == "rebuild_cuda_tensor" else super().find_class(module, name)


def read(payload: str, answers) -> None:
    given = Opener(io.BytesIO(base64.b64decode(payload))).load()
    flat = given["flattened_tensor"]
    found = {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).view(m.shape).tolist() for m in given["metadata"]}
    answers.put(found)


def test_another_process_opens_a_bucket_by_its_handle():
    bucket = [(name, tensor.cuda()) for name, tensor in TENSORS]
    flat = torch.empty(sum(tensor.nbytes for _, tensor in bucket), dtype=torch.uint8, device="cuda")
    layout = lay_out(bucket, flat)
    answers = CONTEXT.Queue()
    process = CONTEXT.Process(target=read, args=(serialized(flat, layout), answers))
    process.start()
    assert answers.get(timeout=60) == {name: tensor.tolist() for name, tensor in TENSORS}
    process.join(30)


def receive(port: int, answers) -> None:
    torch.cuda.set_device(1)
    group = WeightGroup(meet_at("127.0.0.1", port, 2), "g", 1, 2, "nccl", 60)
    tensors = [torch.empty_like(tensor, device="cuda:1") for _, tensor in TENSORS]
    group.broadcast(tensors)
    answers.put([tensor.tolist() for tensor in tensors])


def test_nccl_brings_tensors_to_another_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two CUDA devices")
    store, answers = meeting_point("127.0.0.1", 2), CONTEXT.Queue()
    process = CONTEXT.Process(target=receive, args=(store.port, answers))
    process.start()
    group = WeightGroup(store, "g", 0, 2, "nccl", 60)
    group.broadcast([tensor.cuda() for _, tensor in TENSORS])
    assert answers.get(timeout=60) == [tensor.tolist() for _, tensor in TENSORS]
    group.leave()
    process.join(30)
