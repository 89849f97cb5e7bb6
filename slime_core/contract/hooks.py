"""A plugin's other hooks, called with small made-up data as the core calls them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from slime_core.bound import Bound
from slime_core.contract.examples import groups, prompt_sample, waiting_groups
from slime_core.contract.finding import Finding, ok, problem, unchecked
from slime_core.contract.tensors import check_advantages, check_loss
from slime_core.errors import SlimeError
from slime_core.options import Options
from slime_core.plugins import Plugins, plugin_name
from slime_core.rollout.convert import convert
from slime_core.rollout.filters import first_objection, ranked
from slime_core.testing import ScriptedEngine
from slime_core.types import Drop, Group, Sample, Status


class Broken(Exception):
    """How a hook broke its contract."""


async def check_hooks(plugins: Plugins, reference: str, args: Options) -> list[Finding]:
    """One finding for every hook that the plugin implements or wraps, but for rewards."""
    name = plugin_name(reference)
    findings = []
    for hook, impl in plugins.hooks_of(name).items():
        if impl.wrapper:
            findings.append(unchecked(hook, "wraps other plugins; not called"))
        elif hook in CALLS:
            findings.append(await _called(CALLS[hook], plugins.bind(hook, reference), args))
        elif hook in ("rollout", "log_metrics"):
            findings.append(unchecked(hook, "needs a run; not called"))
    return findings


async def _called(call: Callable[[Bound, Options], Awaitable[str]], bound: Bound, args: Options) -> Finding:
    try:
        return ok(bound.hook, await call(bound, args))
    except Broken as broken:
        return problem(bound.hook, str(broken))
    except SlimeError as error:
        # what it raises for the user is its business; what the core says of its results is a fault
        broke = f"plugin '{bound.name}'" in str(error)
        return problem(bound.hook, str(error)) if broke else unchecked(bound.hook, str(error))
    except AttributeError as error:
        if "CharacterTokenizer" in str(error) or "ScriptedEngine" in str(error):
            return unchecked(bound.hook, f"needs a real tokenizer or engine ({error})")
        return problem(bound.hook, f"it raised AttributeError: {error}")
    except Exception as error:
        return problem(bound.hook, f"it raised {type(error).__name__}: {error}")


async def _get_samples(bound: Bound, args: Options) -> str:
    state: dict[str, Any] = {}
    for count in (1, 3):
        made = bound(args=args, state=state, num_prompts=count)
        if not isinstance(made, list) or len(made) != count or not all(isinstance(s, Sample) for s in made):
            raise Broken(f"asked for {count} prompts it returned {_kind(made)}; return a list of that many samples")
        try:
            state = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise Broken(f"`state` cannot be saved as JSON: {error}") from None
        _round_trip(made)
    return "as many samples as asked for; its state is plain JSON"


async def _generate(bound: Bound, args: Options) -> str:
    limit = 24
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": limit, "stop": []}
    count = 0
    for evaluation in (False, True):
        engine = ScriptedEngine(lambda text: "A long answer of the engine, which ends in 4.")
        made = await bound(
            args=args, engine=engine, sample=prompt_sample(), sampling_params=dict(params), evaluation=evaluation
        )
        if not isinstance(made, list) or not made or not all(isinstance(s, Sample) for s in made):
            raise Broken(f"it returned {_kind(made)}; return a list of at least one sample")
        for sample in made:
            if sample.status is Status.PENDING:
                raise Broken("it returned a sample that is still PENDING; append_generation sets the status")
            if sample.response_length > limit:
                raise Broken(f"a response has {sample.response_length} tokens where max_new_tokens is {limit}")
        _round_trip(made)
        count = len(made)
    return f"{count} finished sample{'s' if count > 1 else ''} for a prompt"


async def _dynamic_filter(bound: Bound, args: Options) -> str:
    verdicts: list[str] = []
    for group in groups():
        before = _dump(group)
        verdict = await first_objection(args, [bound], group)
        if isinstance(verdict, Drop) and (not isinstance(verdict.reason, str) or not verdict.reason.strip()):
            raise Broken(f"Drop's reason must be a short text, it is {verdict.reason!r}")
        if _dump(group) != before:
            raise Broken("it changes the samples; a filter only looks at them")
        verdicts.append(verdict.reason if verdict else "keep")
    return f"of {len(verdicts)} groups it keeps {verdicts.count('keep')}"


async def _over_sampling_filter(bound: Bound, args: Options) -> str:
    made = groups()
    for count in (1, 2, len(made)):
        await ranked(args, [bound], list(made), count)
    return f"ranks {len(made)} groups"


async def _buffer_filter(bound: Bound, args: Options) -> str:
    made = waiting_groups()
    for count in (0, 1, 3, len(made) + 5):
        before = [_dump(group) for group in made]
        given = list(made)
        taken = bound(args=args, groups=given, num_groups=count)
        ids = [id(group) for group in taken] if isinstance(taken, list) else None
        if ids is None or len(ids) > count or len(set(ids)) != len(ids) or not set(ids) <= {id(g) for g in made}:
            raise Broken(
                f"asked for {count} of {len(made)} groups it returned {_kind(taken)}; return at most that many of the "
                "groups it was given, each once"
            )
        if [id(g) for g in given] != [id(g) for g in made] or [_dump(group) for group in made] != before:
            raise Broken("it changes the list or the samples that it is given; return a new list")
    return f"takes from {len(made)} groups, partial ones among them"


async def _convert(bound: Bound, args: Options) -> str:
    batch = await asyncio.to_thread(convert, args, bound, groups())
    for kind in (batch.per_sample, batch.per_token):
        if objects := [key for key, value in kind.items() if value.dtype == object]:
            raise Broken(f"its extra key '{objects[0]}' holds Python objects; use an array of numbers")
    extra = ", ".join([*batch.per_sample, *batch.per_token])
    return f"a batch of {batch.num_samples} samples{f' with {extra}' if extra else ''}"


CALLS: dict[str, Callable[[Bound, Options], Awaitable[str]]] = {
    "get_samples": _get_samples,
    "generate": _generate,
    "dynamic_filter": _dynamic_filter,
    "over_sampling_filter": _over_sampling_filter,
    "buffer_filter": _buffer_filter,
    "convert_train_data": _convert,
    "estimate_advantages": check_advantages,
    "policy_loss": check_loss,
}


def _dump(group: Group) -> str:
    return json.dumps([sample.to_dict() for sample in group], default=repr)


def _round_trip(samples: Group) -> None:
    """Refuse samples that the buffer could not save."""
    for sample in samples:
        try:
            json.dumps(Sample.from_dict(sample.to_dict()).to_dict())
        except (TypeError, ValueError) as error:
            raise Broken(f"a sample cannot be saved as JSON: {error}; keep metadata plain") from None


def _kind(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
