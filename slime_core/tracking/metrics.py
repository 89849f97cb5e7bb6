"""PLACEHOLDER until the tracking component lands; its author overwrites this file."""
import numpy as np
def rollout_metrics(groups, dropped, failed):
    s=[x for g in groups for x in g]; r=[x.reward for x in s if x.reward is not None]
    return {"reward/mean": float(np.mean(r)) if r else float("nan"), "rollout/response_length_mean": float(np.mean([x.response_length for x in s]))}
def eval_metrics(name, groups):
    s=[x for g in groups for x in g]
    return {f"eval/{name}/mean": float(np.mean([x.reward or 0.0 for x in s]))}
