"""SGLang's command line and what is refused before it starts; the server itself is tested in tests/real_sglang."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from slime_core.engines import sglang
from slime_core.engines.process import ServerProcess
from slime_core.engines.server import EngineServer, ready
from slime_core.errors import EngineError, OptionError
from slime_core.options import parse, write_options
from waiting import wait_until

GIVEN = ["--sglang-attention-backend", "torch_native", "--sglang-enable-metrics", "--sglang-cuda-graph-bs", "1", "2"]


def args(model_dir, *words: str):
    return parse(["--model", str(model_dir), "--engine", "sglang", *words]).args


def test_flags_are_passed_through_as_given(model_dir):
    command = sglang.command(args(model_dir, *GIVEN, "--engine-max-requests", "7", "--sglang-x=a b"), 3, 30001)
    assert command[1:3] == ["-m", "sglang.launch_server"]
    line = " ".join(command)
    assert f"--model-path {model_dir} --host 127.0.0.1 --port 30001 --max-running-requests 7" in line
    assert "--attention-backend torch_native --enable-metrics --cuda-graph-bs 1 2" in line
    assert command[-2:] == ["--x", "a b"]


def test_engines_that_free_their_memory_are_started_able_to(model_dir):
    assert "--enable-memory-saver" in sglang.command(args(model_dir, "--offload-engines"), 0, 1)
    on_cpu = args(model_dir, "--offload-engines", "--sglang-device", "cpu")
    assert "--enable-memory-saver" not in sglang.command(on_cpu, 0, 1), "it exists on GPUs only"


def test_flags_survive_the_options_file(model_dir, tmp_path):
    first = args(model_dir, *GIVEN)
    write_options(first, tmp_path / "options.toml")
    again = parse(["--config", str(tmp_path / "options.toml")]).args
    assert again.sglang == first.sglang == {
        "attention-backend": ["torch_native"], "enable-metrics": [], "cuda-graph-bs": ["1", "2"]
    }  # fmt: skip


def test_they_need_sglang(model_dir):
    with pytest.raises(OptionError, match="--sglang-dtype is for SGLang; add --engine sglang"):
        parse(["--model", str(model_dir), "--sglang-dtype", "auto"])


def test_what_slime_sets_itself_is_refused(model_dir):
    with pytest.raises(OptionError, match="--sglang-port is set by slime itself"):
        args(model_dir, "--sglang-port", "1")


@pytest.mark.parametrize("name", ["api-key", "admin-api-key"])
def test_keys_are_refused_and_not_shown(model_dir, name):
    with pytest.raises(OptionError, match=f"--sglang-{name}: no request of a run carries a key") as caught:
        args(model_dir, f"--sglang-{name}", "s3cret")
    assert "s3cret" not in str(caught.value)
    judge = f'judge={{path = "{model_dir}", sglang-{name} = "s3cret"}}'
    with pytest.raises(OptionError, match=f"--frozen-model judge: sglang-{name}: no request"):
        args(model_dir, "--frozen-model", judge)


STAND_IN = """#!{python}
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

port = sys.argv[sys.argv.index("--port") + 1]
if not Path("{first}").exists():
    Path("{first}.part").write_text(port)
    Path("{first}.part").rename("{first}")
    time.sleep(600)
HTTPServer(("127.0.0.1", int(port)), Healthy).serve_forever()
"""
"""Takes long to load its model, the first time."""


class Healthy(BaseHTTPRequestHandler):
    """Another program, which answers everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def test_another_program_on_its_port_is_not_taken_for_the_engine(model_dir, tmp_path):
    python, first = tmp_path / "python", tmp_path / "first"
    python.write_text(STAND_IN.format(python=sys.executable, first=first))
    python.chmod(0o755)
    server = EngineServer(args(model_dir, "--engine-python", str(python)), 0, tmp_path, threads=1)
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(server.start, again=True)
        wait_until(first.exists)
        with HTTPServer(("127.0.0.1", int(first.read_text())), Healthy) as other:
            pool.submit(other.serve_forever, 0.05)
            try:
                url = starting.result(60)
            finally:
                other.shutdown()
                server.stop()
    assert url.rsplit(":", 1)[1] != first.read_text()


def test_a_port_that_another_program_has_is_named(tmp_path):
    process = ServerProcess("engine 3", [sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
    with ThreadPoolExecutor() as pool, HTTPServer(("127.0.0.1", 0), Healthy) as other:
        pool.submit(other.serve_forever, 0.05)
        try:
            with pytest.raises(EngineError, match=rf"engine 3: .* another program, .*:{other.server_port}\b"):
                ready(process, f"http://127.0.0.1:{other.server_port}", lambda: None)
        finally:
            other.shutdown()
            process.stop()


def test_a_python_without_sglang_is_named():
    with pytest.raises(EngineError, match=r"has no SGLang that can be imported \(ModuleNotFoundError: .*sglang"):
        sglang.inspect(sys.executable, {})


def test_a_python_that_is_not_there_is_named():
    with pytest.raises(EngineError, match="--engine-python /no/python cannot be run"):
        sglang.inspect("/no/python", {})


def test_two_releases_of_nccl_are_refused():
    found = sglang.Installation("0.5.23", [], [2, 27, 5])
    sglang.check_nccl(found, (2, 27, 5))
    sglang.check_nccl(found, None)
    sglang.check_nccl(sglang.Installation("0.5.23", []), (2, 27, 5))
    with pytest.raises(OptionError, match=r"NCCL 2[.]27[.]5 and the trainer.s 2[.]28[.]3"):
        sglang.check_nccl(found, (2, 28, 3))


def test_a_release_candidate_is_as_new_as_its_number():
    sglang.check_version("0.5.24rc1")
    with pytest.raises(EngineError, match=r"SGLang 0\.5\.8\.post1 is too old"):
        sglang.check_version("0.5.8.post1")
