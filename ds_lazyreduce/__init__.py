"""ds_lazyreduce: data-parallel reductions for DeepSpeed ZeRO-2 that wait less, hold less and add up right.

    import deepspeed, ds_lazyreduce
    ds_lazyreduce.register()
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config="config.json")

Importing this module is cheap; DeepSpeed is imported by the first call.
"""

from .version import __version__

__all__ = ["ConfigError", "__version__", "initialize", "register", "unregister"]


def __getattr__(name: str):
    if name != "ConfigError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Only now: it imports torch, and the launcher shim first puts sys.path in order.
    from .config import ConfigError

    return ConfigError


def register() -> None:
    """Makes ``deepspeed.initialize`` honour the ``lazy_reduce`` config section. Idempotent.

    Without an enabled section engines are exactly DeepSpeed's own.

    Raises:
        ds_lazyreduce.registration.UnsupportedDeepSpeedError: DeepSpeed's internals differ.
    """
    from . import registration

    registration.register()


def unregister() -> None:
    """Undoes ``register``. Engines that exist keep working. Idempotent."""
    from . import registration

    registration.unregister()


def initialize(*args, **kwargs):
    """``deepspeed.initialize`` with the extension registered: same arguments, same result."""
    from . import registration

    return registration.initialize(*args, **kwargs)
