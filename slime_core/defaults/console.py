"""PLACEHOLDER until the tracking component lands; its author overwrites this file."""
from slime_core import hookimpl
class Console:
    def __init__(self,args): pass
    @hookimpl
    def log_metrics(self,args,step,metrics):
        print(step,{k:round(v,4) for k,v in metrics.items() if k.startswith(("reward/mean","eval","train/loss","perf","train/logprob","rollout/resp"))},flush=True)
