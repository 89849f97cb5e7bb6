"""PLACEHOLDER until the tracking component lands; its author overwrites this file."""
from contextlib import contextmanager
class Progress:
    def __init__(self,*a): pass
    def __enter__(self): return self
    def __exit__(self,*a): pass
    @contextmanager
    def phase(self,name,total=None): yield self
    def update(self,completed,**f): pass
    def print(self,t): print(t)
