import asyncio
import time

import pytest

from slime_core import OptionError
from slime_core.testing import make_options, make_sample
from slime_rm_remote.remote_rm import RemoteReward
from slime_rm_remote.service import ServiceError


@pytest.fixture
def remote(closing):
    def build(service, *flags):
        return closing(RemoteReward(make_options("--reward", "remote_rm", "--remote-rm-url", service.url, *flags)))

    return build


async def test_prompt_response_label_and_metadata_are_sent(serve, remote):
    service = await serve(0.5)
    sample = make_sample("4", prompt="2+2?", label=4, metadata={"kind": "sum"})
    assert await remote(service).reward(sample) == 0.5
    assert service.bodies == [{"prompt": "2+2?", "response": "4", "label": 4, "metadata": {"kind": "sum"}}]


@pytest.mark.parametrize(
    ("answer", "flags", "result"),
    [
        (1, [], 1.0),
        ({"reward": 0.5, "style": 2, "why": "short"}, [], {"reward": 0.5, "style": 2.0}),
        ({"score": -1.0, "reward": 7}, ["--remote-rm-key", "score"], {"reward": -1.0}),
        (True, [], 1.0),
    ],
)
async def test_a_number_or_an_object_is_a_reward(serve, remote, answer, flags, result):
    assert await remote(await serve(answer), *flags).reward(make_sample("4")) == result


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("good", "'good' where a number or an object is needed"),
        (None, "None where a number"),
        ({"score": 1}, "no number under 'reward'"),
        ({"reward": None}, "no number under 'reward'"),
        ((200, "<html>"), "answered no JSON: <html>"),
        ((200, ""), "answered no JSON"),
        ((404, "no such path"), "HTTP 404: no such path"),
        ((422, "label is missing"), "HTTP 422: label is missing"),
    ],
)
async def test_an_answer_that_is_no_reward_is_an_error_at_once(serve, remote, answer, reason):
    service = await serve(answer)
    with pytest.raises(ServiceError, match=reason):
        await remote(service).reward(make_sample("4"))
    assert len(service.bodies) == 1


async def test_an_overloaded_service_is_asked_again(serve, remote):
    service = await serve((503, "busy"), (429, "slow down"), 1.0)
    assert await remote(service).reward(make_sample("4")) == 1.0
    assert len(service.bodies) == 3


async def test_the_service_may_say_how_long_to_wait(serve, remote):
    service = await serve((429, "", {"Retry-After": "1"}), 1.0)
    started = time.monotonic()
    await remote(service).reward(make_sample("4"))
    assert time.monotonic() - started >= 1.0


async def test_the_deadline_ends_the_retries_and_tells_what_the_service_said(serve, remote):
    service = await serve((503, "no GPU free"))
    with pytest.raises(ServiceError, match=r"within 1 s: HTTP 503: no GPU free"):
        await remote(service, "--remote-rm-deadline-s", "1").reward(make_sample("4"))


async def test_what_the_service_said_is_told_though_it_hangs_now(serve, remote):
    async def hang(body):
        await asyncio.sleep(30)

    service = await serve((503, "no GPU free"), hang)
    with pytest.raises(ServiceError, match=r"within 4 s: HTTP 503: no GPU free"):
        await remote(service, "--remote-rm-deadline-s", "4").reward(make_sample("4"))
    assert len(service.bodies) == 2


async def test_a_service_that_never_answers_is_given_up(serve, remote):
    service = await serve(1.0, delay_s=30)
    with pytest.raises(ServiceError, match=r"within 0\.2 s: it did not answer"):
        await remote(service, "--remote-rm-deadline-s", "0.2").reward(make_sample("4"))


async def test_a_service_that_is_not_there_is_named(serve, remote):
    service = await serve(1.0)
    reward = remote(service, "--remote-rm-deadline-s", "0.5")
    await service.server.close()
    with pytest.raises(ServiceError, match="ClientConnectorError"):
        await reward.reward(make_sample("4"))


async def test_batches_hold_as_many_as_allowed_and_give_everyone_its_own(serve, remote):
    service = await serve(lambda bodies: [float(body["response"]) for body in bodies])
    reward = remote(service, "--remote-rm-batch-size", "4")
    results = await asyncio.gather(*(reward.reward(make_sample(str(i))) for i in range(10)))
    assert results == [float(i) for i in range(10)]
    assert sorted(map(len, service.bodies)) == [2, 4, 4]


async def test_a_failed_batch_fails_its_own_samples_alone(serve, remote):
    def grade(bodies):
        return [1.0] if any(body["response"] == "bad" for body in bodies) else [1.0] * len(bodies)

    reward = remote(await serve(grade), "--remote-rm-batch-size", "2")
    samples = [make_sample(text) for text in ("good", "good", "bad", "good")]
    results = await asyncio.gather(*map(reward.reward, samples), return_exceptions=True)
    assert results[:2] == [1.0, 1.0]
    assert all(isinstance(r, ServiceError) and "a list of 1 where a list of 2" in str(r) for r in results[2:])


async def test_a_cancelled_sample_does_not_harm_its_batch(serve, remote):
    service = await serve(lambda bodies: [1.0] * len(bodies), delay_s=0.05)
    reward = remote(service, "--remote-rm-batch-size", "3", "--remote-rm-batch-wait-ms", "200")
    first, second = (asyncio.create_task(reward.reward(make_sample(t))) for t in ("a", "b"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 1.0
    assert [body["response"] for body in service.bodies[0]] == ["b"]


async def test_no_more_requests_than_allowed_are_under_way(serve, remote):
    service = await serve(1.0, delay_s=0.02, hold_until=3)
    reward = remote(service, "--remote-rm-concurrency", "3")
    await asyncio.gather(*(reward.reward(make_sample("4")) for _ in range(12)))
    assert service.most_under_way == 3


async def test_the_rate_limit_spaces_requests(serve, remote):
    reward = remote(await serve(1.0), "--remote-rm-rate-limit", "20")
    started = time.monotonic()
    await asyncio.gather(*(reward.reward(make_sample("4")) for _ in range(11)))
    assert time.monotonic() - started >= 10 / 20


@pytest.mark.parametrize(
    ("flags", "header", "value"),
    [([], "Authorization", "Bearer s3cret"), (["--remote-rm-auth-header", "X-Api-Key"], "X-Api-Key", "s3cret")],
)
async def test_the_secret_comes_from_the_environment(serve, remote, monkeypatch, flags, header, value):
    monkeypatch.setenv("GRADER_TOKEN", "s3cret")
    service = await serve(1.0)
    await remote(service, "--remote-rm-auth-env", "GRADER_TOKEN", *flags).reward(make_sample("4"))
    assert service.headers[0][header] == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--remote-rm-url"),
        (["--remote-rm-url", "http://x", "--remote-rm-auth-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
        (["--remote-rm-url", "http://x", "--remote-rm-deadline-s", "60"], "above --reward-timeout-s 30"),
        (["--remote-rm-url", "localhost:80"], "must begin with http"),
    ],
)
def test_options_that_cannot_work_are_refused(flags, message):
    with pytest.raises(OptionError, match=message):
        RemoteReward(make_options("--reward", "remote_rm", *flags))


async def test_odd_characters_and_megabytes_arrive_as_they_are(serve, remote):
    service = await serve(1.0)
    reward = remote(service)
    for response in ("\ud800\x00\u202e", "7" * 2_000_000, ""):
        sample = make_sample()
        sample.response = response
        assert await reward.reward(sample) == 1.0
        assert service.bodies[-1]["response"] == response
