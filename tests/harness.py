"""What the multi-rank tests share: a model with a known gradient, configs, engines, recorded collectives."""

import copy
import dataclasses
import sys

import torch
import torch.distributed as dist


class OneVec(torch.nn.Module):
    """One parameter `w` of `n` zeros and `forward(x) = (w * x).sum()`, so that the gradient is exactly x."""

    def __init__(self, n, dtype=torch.float32):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(n, dtype=dtype))

    def forward(self, x):
        return (self.w * x).sum()


def base_config(*, precision="bf16", lazy=None, **over):
    """A DeepSpeed config: ZeRO-2, one sample and one micro-step, no clipping, any client optimizer.

    precision: "bf16" or "fp32". lazy: None for no `lazy_reduce` section, True for its defaults, or the
    section's keys. Other keywords replace top-level keys; dicts are merged into those already there.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif precision != "fp32":
        raise ValueError(f'precision must be "bf16" or "fp32", not {precision!r}')
    if lazy:
        config["lazy_reduce"] = {"enabled": True, **(lazy if isinstance(lazy, dict) else {})}
    _merge(config, over)
    return config


def make_engine(model, optimizer, config, **kwargs):
    """The engine for `config`: from ds_lazyreduce if it has a `lazy_reduce` section, else plain DeepSpeed."""
    if "lazy_reduce" in config:
        from ds_lazyreduce import initialize
    else:
        from deepspeed import initialize
    return initialize(model=model, optimizer=optimizer, config=config, **kwargs)[0]


def masters(engine):
    """{parameter name: full fp32 master}. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of this rank. `numel` and `bytes` are those of the rank's input, before any split."""

    name: str  # torch.distributed's name
    numel: int
    dtype: torch.dtype | None
    bytes: int
    bytes_to_peers: int  # what this rank hands to other ranks; all_reduce counted as a ring
    group_size: int
    via_deepspeed: bool  # went through deepspeed.comm, so that its logger and timers see it


# ProcessGroup method -> (torch.distributed's name, position of the input among its arguments)
_METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather_coalesced", 1),
    "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all_single", 1),
    "all_to_all_single": ("all_to_all_single", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "barrier": ("barrier", None),
    "monitored_barrier": ("monitored_barrier", None),
}


class CollectiveRecorder:
    """Records every collective that starts inside the `with`, on any thread of this process.

        with CollectiveRecorder() as record:
            engine.backward(loss)
        record.named("all_reduce")   # -> [Collective, ...]

    It wraps the methods of `ProcessGroup`, where the calls of deepspeed.comm and of torch.distributed meet:
    DeepSpeed keeps references to some torch functions, so that replacing those in the module would miss them.
    Object collectives appear as the tensor collectives they consist of.
    """

    def __init__(self):
        self.calls = []

    def named(self, *names):
        return [call for call in self.calls if call.name in names]

    def names(self):
        return [call.name for call in self.calls]

    def __enter__(self):
        self._originals = {method: vars(dist.ProcessGroup)[method] for method in _METHODS if _has(method)}
        for method in self._originals:
            unbound = getattr(dist.ProcessGroup, method)
            setattr(dist.ProcessGroup, method, self._recording(unbound, *_METHODS[method]))
        return self

    def __exit__(self, *exc_info):
        for method, original in self._originals.items():
            setattr(dist.ProcessGroup, method, original)

    def _recording(self, original, name, position):
        def method(group, *args, **kwargs):
            self.calls.append(_describe(name, group, args, position))
            return original(group, *args, **kwargs)

        return method


def _has(method):
    return method in vars(dist.ProcessGroup)  # the methods differ between torch versions


def _describe(name, group, args, position):
    tensors = _flatten(args[position]) if position is not None and len(args) > position else []
    size, rank = group.size(), group.rank()
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    splits = None
    if name == "all_to_all_single" and len(args) > 3 and args[3]:
        splits = args[3]
    elif name == "all_to_all":
        splits = [t.numel() for t in tensors]
    return Collective(
        name=name,
        numel=sum(t.numel() for t in tensors),
        dtype=tensors[0].dtype if tensors else None,
        bytes=nbytes,
        bytes_to_peers=_bytes_to_peers(name, nbytes, size, rank, splits),
        group_size=size,
        via_deepspeed=_called_from("deepspeed.comm.comm"),
    )


def _bytes_to_peers(name, nbytes, size, rank, splits):
    if splits is not None:
        total = sum(splits)
        return nbytes * (total - splits[rank]) // total if total else 0
    if name.startswith("all_reduce"):
        return 2 * nbytes * (size - 1) // size
    if name.startswith(("reduce_scatter", "all_to_all", "scatter")):
        return nbytes * (size - 1) // size
    if name.startswith("all_gather"):
        return nbytes * (size - 1)
    return 0 if name == "recv" else nbytes


def _flatten(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value or () for tensor in _flatten(item)]


def _called_from(module):
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def _merge(into, over):
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)
