"""How a plugin's class says which options it takes: once, as its type argument."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, get_args, get_origin

from mm_trainer.contracts.spec import NoOptions, OptionsT
from mm_trainer.contracts.spec import Options as BaseOptions


class TakesOptions(Generic[OptionsT]):
    """What is derived from ``BaseModel[MyOptions]``, or another class of these contracts, gets ``Options = MyOptions``.

    So what a type checker knows and what the configuration is validated by are stated in one place. A class without a
    type argument keeps its base's, or states ``Options`` itself.
    """

    Options: ClassVar[type[BaseOptions]] = NoOptions
    """Validates those keys of the configuration's section that only this class knows."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Its own bases only: FSDP2 derives a class from that of every module it wraps.
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin = get_origin(base)
            if not isinstance(origin, type) or not issubclass(origin, TakesOptions):
                continue
            for argument in get_args(base):
                if isinstance(argument, type) and issubclass(argument, BaseOptions):
                    if cls.__dict__.get("Options", argument) is not argument:
                        raise TypeError(f"{cls.__qualname__}: Options and the type argument name two classes")
                    cls.Options = argument
