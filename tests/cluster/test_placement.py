"""Who gets which bundle of the placement group."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from slime_core.cluster.placement import Seat, lent_gpus, plan
from slime_core.errors import ClusterError
from slime_core.testing import make_options

SGLANG = ["--engine", "sglang", "--num-engines", "2", "--num-gpus-per-engine", "4", "--num-trainers", "2"]


def test_sglang_engines_have_their_gpus_beside_the_trainers():
    layout = plan(make_options(*SGLANG, "--placement", "disaggregated"), use_gpus=True)
    assert layout.bundles == [{"CPU": 1.0, "GPU": 1.0}] * 2 + [{"CPU": 1.0, "GPU": 4.0}] * 2
    assert layout.trainers == [Seat(0, 1.0, 1.0), Seat(1, 1.0, 1.0)]
    assert layout.engines == [Seat(2, 1.0, 4.0), Seat(3, 1.0, 4.0)]


def test_sglang_engines_do_not_share_gpus():
    with pytest.raises(ClusterError, match=r"add --offload-engines, or .* --placement disaggregated"):
        plan(make_options(*SGLANG), use_gpus=True)


def test_engines_that_free_their_memory_share_the_gpus_of_as_many_trainers():
    words = ["--offload-engines", "--num-trainers", "8"]
    layout = plan(make_options(*SGLANG, *words), use_gpus=True)
    assert layout.bundles == [{"CPU": 1.0, "GPU": 1.0}] * 8
    assert layout.trainers == [Seat(rank, 0.5, 0.5) for rank in range(8)]
    assert layout.engines == [Seat(0, 0.5, 0.5), Seat(4, 0.5, 0.5)]
    assert layout.lenders == [[0, 1, 2, 3], [4, 5, 6, 7]]
    places = [("a", [str(gpu)]) for gpu in range(4)] + [("b", [str(gpu)]) for gpu in range(4)]
    assert lent_gpus(layout.lenders, places, "disk") == [["0", "1", "2", "3"]] * 2
    with pytest.raises(ClusterError, match="trainers 0 to 3 are on several machines"):
        lent_gpus(layout.lenders, places[1:] + places[:1], "disk")
    with pytest.raises(ClusterError, match="2 engines of 4 GPUs cannot share those of --num-trainers 7"):
        plan(make_options(*SGLANG, "--offload-engines", "--num-trainers", "7"), use_gpus=True)


def test_engines_that_open_the_trainers_memory_see_its_gpu():
    lenders = [[0], [1], [2, 3]]
    places = [("here", [str(gpu)]) for gpu in range(4)]
    assert lent_gpus(lenders, places, "disk") == [["0"], ["1"], ["2", "3"]]
    assert lent_gpus(lenders, places, "tensor") == [["0"], ["1", "0"], ["2", "3", "0"]]
    with pytest.raises(ClusterError, match="engine on the GPUs of trainer 2 cannot open the memory of trainer 0"):
        lent_gpus(lenders, [*places[:2], ("there", ["0"]), ("there", ["1"])], "tensor")
    words = ["--weight-transport", "tensor", "--placement", "disaggregated"]
    with pytest.raises(ClusterError, match="engines on GPUs of their own do not see"):
        plan(make_options(*SGLANG, *words), use_gpus=True)
    assert plan(make_options(*SGLANG, *words), use_gpus=False).engines


def test_an_engine_on_several_machines_has_a_bundle_on_each():
    words = ["--engine", "sglang", "--num-engines", "2", "--sglang-tp-size", "16", "--num-nodes-per-engine", "2"]
    layout = plan(make_options(*words, "--placement", "disaggregated"), use_gpus=True)
    assert layout.bundles == [{"CPU": 1.0, "GPU": 1.0}] + [{"CPU": 1.0, "GPU": 8.0}] * 4
    assert layout.engines == [Seat(1, 1.0, 8.0), Seat(3, 1.0, 8.0)]
    assert layout.followers == [[Seat(2, 1.0, 8.0)], [Seat(4, 1.0, 8.0)]]


def test_on_cpu_no_gpu_is_asked_for():
    layout = plan(make_options(*SGLANG), use_gpus=False)
    assert layout.bundles == [{"CPU": 1.0}] * 2
    assert [seat.num_gpus for seat in layout.engines] == [0.0, 0.0]


def test_frozen_models_have_bundles_of_their_own():
    words = ["--placement", "disaggregated", "--frozen-model"]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text("{}")
        judge = f'judge={{path = "{directory}", num-engines = 2, num-gpus-per-engine = 8}}'
        options = make_options(*SGLANG, *words, judge, f"ref={directory}")
    layout = plan(options, use_gpus=True)
    assert layout.frozen == {"judge": [Seat(4, 1.0, 8.0), Seat(5, 1.0, 8.0)], "ref": [Seat(6, 1.0, 4.0)]}
    assert [bundle["GPU"] for bundle in layout.bundles] == [1.0, 1.0, 4.0, 4.0, 8.0, 8.0, 4.0]


def test_external_engines_take_no_gpu():
    words = [*SGLANG, "--placement", "disaggregated", "--external-engines", "http://a:1", "http://b:2", "http://c:3"]
    layout = plan(make_options(*words), use_gpus=True)
    assert len(layout.engines) == 3
    assert all(seat.num_gpus == 0 for seat in layout.engines)
    assert layout.bundles[2:] == [{"CPU": 1.0}] * 3
