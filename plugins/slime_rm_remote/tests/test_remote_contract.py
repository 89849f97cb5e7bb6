import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime_core.testing import check_plugin


class Grader(BaseHTTPRequestHandler):
    """A service in threads of its own: gives 1 to every sample, and 'Score: 5' as a judge."""

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = {"choices": [{"message": {"content": "Score: 5"}}]} if "chat" in self.path else 1.0
        content = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


class Service(ThreadingHTTPServer):
    request_queue_size = 1024
    """Connections that wait; with the usual 5, some of hundreds are lost and try again seconds later."""


@pytest.fixture
def url():
    server = Service(("127.0.0.1", 0), Grader)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_remote_reward_keeps_the_contract(url):
    check_plugin("remote_rm", "--remote-rm-url", url)


def test_the_judge_keeps_the_contract(url):
    check_plugin("judge", "--judge-url", url, "--judge-model", "m")
