"""The generator: agents in files and commands, started, served, graded, ended."""

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest

from slime_core import OptionError, PluginError, Sample, Status
from slime_core.testing import make_options
from slime_gateway.plugin import Gateway

AGENT = """
from openai import AsyncOpenAI

async def agent(task):
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = task.messages
    for turn in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "sure?"}]
    return float(answer.choices[0].message.content == task.label)
"""
ASK = """
import aiohttp

async def ask(task):
    body, headers = {"messages": task.messages}, {"Authorization": f"Bearer {task.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        async with client.post(f"{task.base_url}/chat/completions", json=body) as answer:
            return await answer.json()
"""
"""An agent without a large library, for tests that are not about clients."""

PATIENCE_S = ("2", "8", "32")
"""Time limits, each for a busy machine on which the agent had not asked under the one before."""


@pytest.fixture
async def start(tmp_path):
    """`plugin, args = start(source, *flags)`: a gateway whose agent has this source; closed when the test ends."""
    plugins = []

    def begin(source: str | None, *flags: str):
        named: list[str] = []
        if source is not None:
            path = tmp_path / "my_agent.py"
            path.write_text(source)
            named = ["--gateway-agent", str(path)]
        args = make_options("--generate", "gateway", *named, *flags)
        plugins.append(Gateway(args))
        return plugins[-1], args

    yield begin
    for plugin in plugins:
        plugin.close()
    await asyncio.sleep(0.05)


def prompt(index: int = 3, **fields) -> Sample:
    return Sample(prompt="7+5?", label="12", index=index, group_index=index, rollout_index=index, **fields)


async def generate(start_result, engine, sample: Sample | None = None, evaluation: bool = False) -> list[Sample]:
    plugin, args = start_result
    return await plugin.generate(
        args=args,
        engine=engine,
        sample=prompt() if sample is None else sample,
        sampling_params={"temperature": 1.0, "max_new_tokens": 1000, "stop": []},
        evaluation=evaluation,
    )


def children() -> set[psutil.Process]:
    """Of this process, living, and theirs."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def running(*words: str) -> bool:
    """Whether any process of this machine has this command line."""
    return any(p.info["cmdline"] == [*words] for p in psutil.process_iter(["cmdline"]))


async def until(condition, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_an_agent_of_ten_lines_with_the_openai_client(start, playing, tokenizer):
    engine = playing("13", "12")
    (sample,) = await generate(start(AGENT), engine)
    own = sample.tokens[sample.prompt_length :][sample.loss_mask > 0]
    assert tokenizer.decode(own) == "13<|im_end|>12<|im_end|>"
    assert (sample.reward, sample.status, sample.turn_ends) == (1.0, Status.COMPLETED, [3, sample.response_length])


async def test_rows_reach_the_agent_and_what_it_returns_reaches_the_sample(start, playing):
    source = ASK + (
        "async def agent(task):\n    await ask(task)\n"
        "    return {'reward': task.metadata['worth'], 'evaluation': task.evaluation, 'index': task.index}\n"
    )
    sample = prompt(5, metadata={"worth": 0.25})
    (sample,) = await generate(start(source), playing("x"), sample, evaluation=True)
    assert sample.reward == 0.25
    assert sample.rewards == {"gateway": 0.25, "gateway/evaluation": 1.0, "gateway/index": 5.0}


async def test_a_function_of_another_name(start, playing, tmp_path):
    path = tmp_path / "other.py"
    path.write_text(ASK + "async def solve(task):\n    await ask(task)\n    return 'answer'\n")
    (sample,) = await generate(start(None, "--gateway-agent", f"{path}:solve"), playing("x"))
    assert sample.response == "answer"


async def test_many_agents_share_a_process(start, playing):
    source = (
        ASK + "import os\nasync def agent(task):\n    await ask(task)\n    return {'reward': 1, 'pid': os.getpid()}\n"
    )
    plugin = start(source, "--gateway-num-processes", "2")
    engine = playing("x")
    parts = await asyncio.gather(*(generate(plugin, engine, prompt(i)) for i in range(40)))
    assert len({sample.rewards["gateway/pid"] for (sample,) in parts}) == 2
    assert all(sample.reward == 1.0 for (sample,) in parts)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyError('x')", "KeyError"),
        ("await ask(task)\n    raise ValueError('bad tool')", "ValueError: bad tool"),
        ("await ask(task)\n    return float('nan')", "finite number"),
        ("await ask(task)\n    return object()", "TypeError"),
        ("await ask(task)\n    return [1]", "not list"),
        ("return 1.0", "without a single answered request"),
        ("import os; os._exit(3)", "died (exit code 3)"),
    ],
)
async def test_an_agent_that_fails_makes_its_sample_failed_and_the_next_one_runs(start, playing, body, words):
    works = "if task.index == 4:\n        await ask(task)\n        return 1.0"
    source = f"{ASK}\nasync def agent(task):\n    {works}\n    {body}\n"
    plugin, engine = start(source), playing("x")
    (sample,) = await generate(plugin, engine)
    assert sample.status is Status.FAILED
    assert words in sample.failure
    assert sample.reward is None
    (sample,) = await generate(plugin, engine, prompt(4))
    assert sample.reward == 1.0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import nothing_of_that_name\n", "nothing_of_that_name"),
        ("def agent(task): pass\n", "must be `async def`"),
        ("x = 1\n", "has no function 'agent'"),
        ("import sys; sys.exit(2)\n", "SystemExit"),
        ("import os; os._exit(2)\n", "exited with code 2"),
    ],
)
async def test_an_agent_that_cannot_be_loaded_stops_the_run(start, playing, source, words):
    with pytest.raises(PluginError, match=r"agent of --generate gateway cannot be used") as error:
        await generate(start(source), playing("x"))
    assert words in str(error.value)


async def test_what_agents_print_is_logged(start, playing, caplog, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    source = ASK + "async def agent(task):\n    await ask(task)\n    print('looked up é')\n    raise KeyError('x')\n"
    with caplog.at_level("INFO", "slime_gateway"):
        await generate(start(source), playing("x"))
        await until(lambda: "agent: KeyError: 'x'" in caplog.messages)
    assert "agent: looked up é" in caplog.messages


async def test_an_agent_that_never_ends_is_ended_and_what_it_did_is_kept(start, playing):
    source = ASK + "import asyncio\nasync def agent(task):\n    await ask(task)\n    await asyncio.sleep(1000)\n"
    for timeout_s in PATIENCE_S:
        (sample,) = await generate(start(source, "--gateway-timeout-s", timeout_s), playing("x"))
        if sample.response:
            break
    assert (sample.status, sample.response) == (Status.TRUNCATED, "x")


async def test_an_agent_that_holds_its_process_is_killed(start, playing, monkeypatch):
    monkeypatch.setattr("slime_gateway.agents.CANCEL_TIMEOUT_S", 0.3)
    source = ASK + "async def agent(task):\n    await ask(task)\n    while task.index == 3: pass\n    return 1.0\n"
    engine = playing("x")
    for timeout_s in PATIENCE_S:
        plugin = start(source, "--gateway-timeout-s", timeout_s)
        (sample,) = await generate(plugin, engine)
        if sample.response:
            break
    assert sample.status is Status.TRUNCATED
    (sample,) = await generate(plugin, engine, prompt(4))
    assert sample.reward == 1.0


async def test_an_agent_that_asks_for_ever_is_ended_by_its_turns(start, playing):
    source = ASK + "async def agent(task):\n    while 'error' not in await ask(task): pass\n    return 0.5\n"
    engine = playing("x")
    samples = await generate(start(source, "--gateway-max-turns", "5"), engine)
    assert len(engine.requests) == 5
    assert {sample.reward for sample in samples} == {0.5}
    assert samples[-1].status is Status.TRUNCATED


async def test_a_cancelled_generation_ends_its_agent(start, playing, tmp_path, monkeypatch):
    monkeypatch.setattr("slime_gateway.agents.CANCEL_TIMEOUT_S", 60.0)
    source = ASK + (
        "import asyncio\nasync def agent(task):\n    try:\n        await ask(task)\n"
        f"    finally:\n        open({str(tmp_path / 'ended')!r}, 'w').close()\n"
    )
    engine = playing("x")
    engine.hold()
    task = asyncio.create_task(generate(start(source), engine))
    await until(lambda: engine.under_way)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    await until((tmp_path / "ended").exists)
    assert (tmp_path / "ended").exists()
    await until(lambda: not engine.under_way)


async def test_closing_ends_every_process(start, playing):
    others = children()  # of other tests
    plugin, args = start(ASK + "async def agent(task):\n    await ask(task)\n")
    await generate((plugin, args), playing("x"))
    assert children() - others
    plugin.close()
    await until(lambda: children() <= others)


async def test_closing_while_the_process_is_being_started_ends_it(start, playing, monkeypatch):
    others, begin = children(), asyncio.create_subprocess_exec
    plugin, args = start(ASK + "async def agent(task):\n    await ask(task)\n")

    async def begin_and_close(*words, **settings):
        process = await begin(*words, **settings)
        plugin.close()
        return process

    monkeypatch.setattr("asyncio.create_subprocess_exec", begin_and_close)
    with pytest.raises(PluginError, match="has been closed"):
        await generate((plugin, args), playing("x"))
    await until(lambda: children() <= others)
    with pytest.raises(PluginError, match="has been closed"):
        await generate((plugin, args), playing("x"))


# --- partial rollout --------------------------------------------------------------------------------------------------
PARTIAL = ("--partial-rollout", "--max-staleness", "1")


async def stopped_in_the_second_turn(plugin, playing) -> list[Sample]:
    engine = playing("13", "12")
    engine.num_partial, engine.hold_after = 1, 1
    task = asyncio.create_task(generate(plugin, engine))
    await until(lambda: engine.under_way and len(engine.requests) == 2)
    engine.stop()
    return await task


async def test_an_agent_lives_on_between_rounds(start, playing, tokenizer):
    plugin = start(AGENT, *PARTIAL)
    (waiting,) = await stopped_in_the_second_turn(plugin, playing)
    assert waiting.status is Status.ABORTED
    engine = playing([tokenizer.eos_token_id])
    engine.version = 1
    (sample,) = await generate(plugin, engine, Sample.from_dict(waiting.to_dict()))
    own = sample.loss_mask > 0
    assert tokenizer.decode(sample.tokens[sample.prompt_length :][own]) == "13<|im_end|>12<|im_end|>"
    assert sample.tokens[: len(waiting.tokens)].tolist() == waiting.tokens.tolist()
    assert sorted(set(sample.weight_versions[own].tolist())) == [0, 1]


TWO_CONVERSATIONS = (
    ASK
    + """
async def agent(task):
    for _ in range(2):
        await ask(task)
        task.messages[0]["content"] += " Once more."
    return 0.5
"""
)


async def stopped_in_the_second_conversation(plugin, playing) -> list[Sample]:
    """A rollout's two ABORTED samples, numbered as the core does it."""
    engine = playing("13", "12")
    engine.num_partial, engine.hold_after = 1, 1
    task = asyncio.create_task(generate(plugin, engine))
    await until(lambda: engine.under_way and len(engine.requests) == 2)
    engine.stop()
    waiting = await task
    assert [sample.status for sample in waiting] == [Status.ABORTED] * 2
    waiting[1].index = 1000
    return [Sample.from_dict(sample.to_dict()) for sample in waiting]


async def together(plugin, engine, samples: list[Sample]) -> list[list[Sample]]:
    return await asyncio.gather(*(generate(plugin, engine, sample) for sample in samples))


async def test_conversations_of_one_rollout_come_back_to_their_agent(start, playing):
    plugin = start(TWO_CONVERSATIONS, *PARTIAL)
    waiting = await stopped_in_the_second_conversation(plugin, playing)
    first, second = await together(plugin, playing("2"), waiting)
    assert [sample.reward for sample in (*first, *second)] == [0.5, 0.5]
    assert [len(first), len(second)] == [1, 1]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
async def test_conversations_whose_agent_is_gone_become_one_session(start, playing, order):
    waiting = await stopped_in_the_second_conversation(start(TWO_CONVERSATIONS, *PARTIAL), playing)
    resumed = start(TWO_CONVERSATIONS, *PARTIAL)
    parts = await together(resumed, playing("13", "12"), [waiting[i] for i in order])
    assert [len(parts[i]) for i in order] == [2, 0]
    made = parts[order.index(0)]
    assert [(sample.status, sample.reward) for sample in made] == [(Status.COMPLETED, 0.5)] * 2
    assert resumed[0]._exchange.stats()["sessions"] == 1


async def test_conversations_whose_agent_is_gone_may_wait_again(start, playing):
    waiting = await stopped_in_the_second_conversation(start(TWO_CONVERSATIONS, *PARTIAL), playing)
    resumed, engine = start(TWO_CONVERSATIONS, *PARTIAL), playing("13", "12")
    engine.hold()
    running = asyncio.create_task(together(resumed, engine, waiting))
    await until(lambda: engine.under_way)
    engine.stop()
    (again,), nothing = await running
    assert (again.status, nothing) == (Status.ABORTED, [])
    samples = await generate(resumed, playing("13", "12"), again)
    assert [sample.reward for sample in samples] == [0.5, 0.5]
    assert resumed[0]._exchange.stats()["sessions"] == 1


async def test_an_agent_that_fails_fails_its_rollout_once(start, playing):
    plugin = start(TWO_CONVERSATIONS.replace("return 0.5", "raise ValueError('bad')"), *PARTIAL)
    waiting = await stopped_in_the_second_conversation(plugin, playing)
    (failed,), nothing = await together(plugin, playing("2"), waiting)
    assert (failed.status, nothing) == (Status.FAILED, [])


async def test_a_fresh_sample_of_the_same_number_begins_anew(start, playing):
    plugin = start(AGENT, *PARTIAL)
    (waiting,) = await stopped_in_the_second_turn(plugin, playing)
    waiting.restart()
    engine = playing("12")
    (sample,) = await generate(plugin, engine, waiting)
    assert (sample.reward, len(engine.requests)) == (1.0, 2)
    assert (sample.weight_versions[sample.loss_mask > 0] == 0).all()


async def test_a_sample_whose_agent_is_gone_begins_anew(start, playing):
    (waiting,) = await stopped_in_the_second_turn(start(AGENT, *PARTIAL), playing)
    engine = playing("12")
    (sample,) = await generate(start(AGENT, *PARTIAL), engine, waiting)
    assert (sample.reward, len(engine.requests)) == (1.0, 2)


# --- commands ---------------------------------------------------------------------------------------------------------
COMMAND = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))
base = os.environ["OPENAI_BASE_URL"]
answer = post(base + "/chat/completions", {"messages": [{"role": "user", "content": task["prompt"]}]})
said = answer["choices"][0]["message"]["content"]
"""


def command(tmp_path: Path, more: str) -> str:
    path = tmp_path / "command.py"
    path.write_text(COMMAND + more)
    return f"{sys.executable} {path.name}"


async def test_a_command_is_an_agent(start, playing, tmp_path):
    words = command(tmp_path, 'post(base[:-3] + "/buffer/write", {"reward": float(said == task["label"])})\n')
    plugin = start(None, "--gateway-command", words, "--gateway-directory", str(tmp_path))
    (sample,) = await generate(plugin, playing("12"))
    assert (sample.reward, sample.response) == (1.0, "12")


async def test_a_command_that_fails_says_why(start, playing, tmp_path):
    words = command(tmp_path, "sys.exit('no such tool')\n")
    plugin = start(None, "--gateway-command", words, "--gateway-directory", str(tmp_path))
    (sample,) = await generate(plugin, playing("12"))
    assert sample.failure == "the agent failed: RuntimeError: the command exited with code 1: no such tool"


async def test_a_command_that_leaves_something_running_has_ended_all_the_same(start, playing, tmp_path):
    seconds = str(time.monotonic_ns())  # no other process sleeps as long
    words = command(tmp_path, f"import subprocess; subprocess.Popen(['sleep', '{seconds}'])\n")
    plugin = start(None, "--gateway-command", words, "--gateway-directory", str(tmp_path))
    (sample,) = await generate(plugin, playing("12"))
    assert sample.status is Status.COMPLETED
    await until(lambda: not running("sleep", seconds))


async def test_a_command_and_what_it_started_are_killed_when_time_is_up(start, playing, tmp_path):
    seconds = str(time.monotonic_ns())
    words = command(tmp_path, f"import subprocess; subprocess.run(['sleep', '{seconds}'])\n")
    for timeout_s in PATIENCE_S:
        where = ("--gateway-directory", str(tmp_path), "--gateway-timeout-s", timeout_s)
        (sample,) = await generate(start(None, "--gateway-command", words, *where), playing("12"))
        if sample.response:
            break
    assert sample.status is Status.TRUNCATED
    await until(lambda: not running("sleep", seconds))


# --- programs that come by themselves ---------------------------------------------------------------------------------
async def test_without_an_agent_programs_fetch_their_tasks(start, playing):
    plugin = start(None, "--gateway-port", "0")
    running = asyncio.create_task(generate(plugin, playing("12")))
    await until(lambda: plugin[0]._url)
    async with aiohttp.ClientSession() as program:
        async with program.post(f"{plugin[0]._url}/start_rollout", json={}) as answer:
            task = await answer.json()
        headers = {"Authorization": f"Bearer {task['api_key']}"}
        body = {"messages": [{"role": "user", "content": task["prompt"]}]}
        async with program.post(f"{task['base_url']}/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
        async with program.post(f"{plugin[0]._url}/buffer/write", json={"reward": 0.5}, headers=headers) as answer:
            assert answer.status == 200
    (sample,) = await running
    assert sample.reward == 0.5


async def test_a_program_is_given_the_address_that_it_came_by(start, playing, monkeypatch):
    monkeypatch.setenv("SLIME_TEST_GATEWAY_KEY", "secret")
    plugin = start(None, "--gateway-host", "0.0.0.0", "--gateway-key-env", "SLIME_TEST_GATEWAY_KEY")
    running = asyncio.create_task(generate(plugin, playing("12")))
    await until(lambda: plugin[0]._url)
    assert plugin[0]._url.startswith("http://127.0.0.1:")
    url = plugin[0]._url.replace("127.0.0.1", "127.0.0.2")
    async with (
        aiohttp.ClientSession(headers={"x-api-key": "secret"}) as program,
        program.post(f"{url}/start_rollout", json={}) as answer,
    ):
        assert (await answer.json())["base_url"] == f"{url}/v1"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# --- options ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gateway-agent", "nowhere.py"], "there is no file nowhere.py"),
        (["--gateway-max-turns", "0"], "at least 1"),
        (["--gateway-timeout-s", "-1"], "above 0"),
        (["--gateway-port", "70000"], "65535"),
        (["--gateway-host", "0.0.0.0"], "--gateway-key-env"),
        (["--gateway-timeout-s", "3600"], "--generate-timeout-s 3600"),
        (["--gateway-key-env", "SLIME_TEST_NO_SUCH_KEY"], "is not set"),
        (["--gateway-command", "true", "--gateway-agent", __file__], "name the agent once"),
    ],
)
def test_a_wrong_option_is_named(flags, words):
    with pytest.raises(OptionError, match=words):
        Gateway(make_options("--generate", "gateway", *flags))


async def test_a_port_that_is_taken_is_named(start, playing):
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(OptionError, match=f"cannot listen on 127.0.0.1:{port}"):
            await generate(start(AGENT, "--gateway-port", str(port)), playing("x"))


async def test_a_model_without_a_chat_template_is_named(start, playing, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(OptionError, match="chat template"):
        await generate(start(AGENT), playing("x"))


def test_the_example_of_the_readme_is_the_one_that_is_tested():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    example = (Path(__file__).parents[1] / "examples" / "my_agent.py").read_text()
    assert example in readme
