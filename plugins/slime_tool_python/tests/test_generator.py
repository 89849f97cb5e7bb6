import numpy as np
import pytest

from slime_core import OptionError, Sample, Status
from slime_core.testing import ScriptedEngine, make_options
from slime_tool_python.generator import ToolPython, code_of
from slime_tool_python.sandbox import missing_protection

pytestmark = pytest.mark.skipif(missing_protection() is not None, reason=str(missing_protection()))

CALL = "Let me compute. <code>\n```python\nprint(6 * 7)\n```\n</code>"
OUTPUT = "\n<interpreter>\n42\n</interpreter>\n"


@pytest.fixture
def plugin():
    return ToolPython(make_options("--generate", "tool_python", "--tool-python-max-turns", "3"))


async def run(plugin, engine, sample: Sample | None = None, max_new_tokens: int = 1000) -> Sample:
    sample = sample or Sample(prompt="?", tokens=np.array(engine.tokenizer.encode("?"), np.int32))
    params = {"max_new_tokens": max_new_tokens, "stop": []}
    (finished,) = await plugin.generate(engine=engine, sample=sample, sampling_params=params)
    return finished


async def test_code_is_run_and_its_output_is_not_trained(plugin):
    sample = await run(plugin, ScriptedEngine([CALL, "It is 42."]))
    assert sample.response == CALL + OUTPUT + "It is 42."
    own = [True] * len(CALL) + [False] * len(OUTPUT) + [True] * len("It is 42.")
    assert sample.loss_mask.astype(bool).tolist() == own
    assert (~np.isnan(sample.logprobs)).tolist() == own
    assert (sample.status, sample.metadata["tool_calls"], sample.metadata["failed_tool_calls"]) == (
        Status.COMPLETED,
        1,
        0,
    )


async def test_an_error_of_the_code_is_what_the_model_reads_and_is_counted(plugin):
    sample = await run(plugin, ScriptedEngine(["<code>1 / 0</code>", "oh"]))
    assert "ZeroDivisionError: division by zero\n</interpreter>" in sample.response
    assert sample.metadata["failed_tool_calls"] == 1


async def test_a_turn_without_code_ends_the_sample(plugin):
    engine = ScriptedEngine(["It is 42."])
    assert (await run(plugin, engine)).response == "It is 42."
    assert len(engine.requests) == 1


async def test_a_block_that_was_never_opened_is_told(plugin):
    sample = await run(plugin, ScriptedEngine(["print(1)</code>", "sorry"]))
    assert "<interpreter>\nthere is no code; write it between <code> and </code>\n" in sample.response


async def test_silence_is_told(plugin):
    assert "(it printed nothing)" in (await run(plugin, ScriptedEngine(["<code>x = 1</code>", "done"]))).response


async def test_a_model_that_calls_for_ever_ends_with_its_turns(plugin):
    engine = ScriptedEngine(lambda text: "<code>print(1)</code>")
    sample = await run(plugin, engine)
    assert len(engine.requests) == 3
    assert sample.status is Status.COMPLETED


async def test_output_that_leaves_no_room_truncates_the_sample(plugin):
    sample = await run(plugin, ScriptedEngine([CALL, "x"]), max_new_tokens=len(CALL) + 5)
    assert (sample.response, sample.status) == (CALL, Status.TRUNCATED)


async def test_an_aborted_sample_whose_code_was_not_run_runs_it_first(plugin):
    stopped = ScriptedEngine([])
    stopped.stop()
    engine = ScriptedEngine([CALL])
    waiting = await run(ToolPython(make_options("--generate", "tool_python", "--tool-python-max-turns", "1")), engine)
    waiting.status = Status.ABORTED
    sample = await run(plugin, ScriptedEngine(["It is 42."]), waiting)
    assert sample.response == CALL + OUTPUT + "It is 42."


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("<code>x</code>", "x"),
        ("<code>\n```python\nx\n```\n</code>", "x\n"),
        ("<code>\n```py\nx\ny```</code>", "x\ny"),
        ("<code>```\nx\n```</code>", "x\n"),
        ("<code>\n```python\nx\n</code>", "x\n"),
        ("<code>first <code>x</code>", "x"),
        ("<code>x</code> rest", "x"),
        ("<code></code>", None),
        ("<code>\n```python\n```</code>", None),
        ("x</code>", None),
        ("</code><code>", None),
        ("no code", None),
    ],
)
def test_the_code_of_a_turn(text, code):
    assert code_of(text) == code


@pytest.mark.parametrize("flag", ["--tool-python-timeout-s", "--tool-python-memory-mib", "--tool-python-max-turns"])
def test_limits_must_be_limits(flag):
    with pytest.raises(OptionError, match=flag):
        make_options("--generate", "tool_python", flag, "0")


async def test_the_unsafe_flag_needs_no_protection(monkeypatch):
    monkeypatch.setattr("slime_tool_python.sandbox.missing_protection", lambda: "nothing here")
    plugin = ToolPython(make_options("--generate", "tool_python", "--tool-python-unsafe"))
    assert OUTPUT in (await run(plugin, ScriptedEngine([CALL, "done"]))).response
