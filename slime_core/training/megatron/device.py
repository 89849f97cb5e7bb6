"""Lets stock megatron-core run where there is no GPU; with one, its version is checked and one name repaired.

megatron-core asks for CUDA by name: `torch.cuda.current_device()`, `device="cuda"`, streams, a CUDA random state,
tensors of type `torch.cuda.FloatTensor`. On CPU its modules get a view of torch that answers these for the CPU. The
shim touches private names, so it is good for one version only.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from slime_core.training.megatron.config import check_installed

LAZY_MODULES = (
    "models.gpt",
    "distributed",
    "optimizer.distrib_optimizer",
    "optimizer.clip_grads",
    "pipeline_parallel.schedules",
    "transformer.moe.moe_layer",
    "transformer.multi_latent_attention",
    "dist_checkpointing.strategies.torch",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.fully_parallel",
)
"""Below `megatron.core`; all that a trainer ever loads, so that no module comes after the shim."""

FACTORIES = ("tensor", "zeros", "zeros_like", "ones", "ones_like", "empty", "empty_like", "full", "arange", "rand")
"""Of torch, those that megatron-core calls with a device."""


def prepare_megatron(device: str) -> None:
    """Load megatron-core and, for `cpu`, let it run there; may be called again.

    Raises:
        OptionError: when megatron-core is missing or another version.
    """
    check_installed()
    with warnings.catch_warnings():  # what is missing without a GPU is said once, and below
        warnings.simplefilter("ignore")
        for name in LAZY_MODULES:
            importlib.import_module(f"megatron.core.{name}")
    _name_what_is_missing()
    if device == "cpu":
        _install()


def _install() -> None:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("megatron.core")]
    if any(isinstance(module.__dict__.get("torch"), _Torch) for module in modules):
        return
    view = _Torch()
    for module in modules:
        if module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = view
    # compiled helpers would need a compiler at run time
    torch.compiler.set_stance("force_eager")
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment,method-assign]
    _replace_random_state()
    _accept_cpu_types()
    _repair_moe()


class _Torch(types.ModuleType):
    """torch as megatron-core sees it: everything is torch's own but what asks for CUDA."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _Cuda()
        self.distributed = _Distributed()
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Cuda(types.ModuleType):
    """torch.cuda of a machine whose only device is the CPU."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing)
        self.Stream = self.Event = _Stream
        self.stream = lambda stream: contextlib.nullcontext()
        self.current_stream = self.default_stream = lambda *args: _Stream()
        self.synchronize = self.empty_cache = self.manual_seed = self.set_device = _nothing
        self.current_device = lambda: torch.device("cpu")
        self.device_count = lambda: 1
        self.is_current_stream_capturing = lambda: False
        self.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        self.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Distributed(types.ModuleType):
    """torch.distributed for gloo, which shares out parts of one size only; experts get as many tokens as come."""

    def __init__(self) -> None:
        super().__init__("torch.distributed")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    @staticmethod
    def all_gather(outputs: list[torch.Tensor], own: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
        """Parts of any number of rows."""
        rows = [len(output) if output.dim() else 0 for output in outputs]
        if min(rows) == max(rows):
            return torch.distributed.all_gather(outputs, own, group=group, **kwargs)
        padded = own.new_zeros(max(rows), *own.shape[1:])
        padded[: len(own)] = own
        full = [torch.empty_like(padded) for _ in outputs]
        torch.distributed.all_gather(full, padded, group=group)
        for output, part in zip(outputs, full, strict=True):
            output.copy_(part[: len(output)])
        return None

    @staticmethod
    def reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], group: Any = None, **kwargs: Any) -> Any:
        """Sums of parts of any number of rows."""
        summed = torch.cat(inputs)
        torch.distributed.all_reduce(summed, group=group)
        output.copy_(summed.split([len(part) for part in inputs])[group.rank()])


class _Stream:
    """A stream or an event of work that is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Whatever it is for."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _nothing

    def record_event(self, event: Any = None) -> _Stream:
        """An event that has happened."""
        return _Stream()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = None  # type: ignore[assignment]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Instead of what only a GPU needs."""


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


class _RandomStates:
    """In place of a random state for each kind of parallelism: only initialisation draws, and is overwritten."""

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        """Draw from the one state there is."""
        yield

    def is_initialized(self) -> bool:
        """Always."""
        return True

    def get_states(self) -> dict[str, Any]:
        """None of its own."""
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        """Likewise."""

    def add(self, name: str, seed: int) -> None:
        """Likewise."""

    def reset(self) -> None:
        """Likewise."""


def _replace_random_state() -> None:
    from megatron.core.tensor_parallel import random

    random._CUDA_RNG_STATE_TRACKER = _RandomStates()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _accept_cpu_types() -> None:
    """Three functions ask whether tensors are `torch.cuda.FloatTensor` and the like."""
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    kind = distrib_optimizer.DistributedOptimizer
    kind._build_model_and_main_param_groups = classmethod(  # type: ignore[method-assign]
        _type_blind(kind._build_model_and_main_param_groups.__func__)
    )
    half = optimizer.Float16OptimizerWithFloat16Params
    half.__init__ = _type_blind(half.__init__)  # type: ignore[method-assign]
    blind = _type_blind(clip_grads.clip_grad_by_total_norm_fp32)
    for module in (clip_grads, optimizer, distrib_optimizer):
        if hasattr(module, "clip_grad_by_total_norm_fp32"):
            module.clip_grad_by_total_norm_fp32 = blind


def _type_blind(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in whose body a CPU tensor's type reads like that of a GPU's."""

    def called(*args: Any, **kwargs: Any) -> Any:
        own = torch.Tensor.type

        def type_name(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
            answer = own(tensor, *given, **named)
            return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

        torch.Tensor.type = type_name  # type: ignore[assignment,method-assign]
        try:
            return function(*args, **kwargs)
        finally:
            torch.Tensor.type = own  # type: ignore[method-assign]

    return called


def _name_what_is_missing() -> None:
    """Routers ask for a function of Transformer-Engine's by a name that without it is not there."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _repair_moe() -> None:
    """A copy to the host that also takes the host's tensors."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    move = moe_utils.maybe_move_tensor_to_cpu

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy() if as_numpy else tensor
        return move(tensor, as_numpy, record_stream)

    for module in (moe_utils, token_dispatcher):
        if hasattr(module, "maybe_move_tensor_to_cpu"):
            module.maybe_move_tensor_to_cpu = moved
