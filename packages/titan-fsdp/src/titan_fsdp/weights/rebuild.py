"""Tensors of a module from its own constructor, run once more on the CPU.

A constructor's arguments are not recorded anywhere. They are taken from the module's attributes, and only if every
argument is an attribute of the same name, as in ``self.dim = dim``. Where a module does not keep its arguments, a
module around it may: a Hugging Face model keeps its ``config``. The second module is trusted only if its plain
attributes (numbers, strings) equal the first one's. Everything else is refused: a wrong table is worse than none.
"""

import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from titan_fsdp.torch_private import original_class

_PLAIN = (int, float, str, bool, bytes, torch.dtype, type(None))


Chain = Sequence[tuple[str, nn.Module]]
"""A module and the modules around it, innermost first; each with the path from it to the first."""


def rebuild(chain: Chain, leaves: Sequence[str], built: dict[int, nn.Module] | None = None) -> dict[str, Tensor]:
    """The tensors ``leaves`` of the first module of ``chain``, as its constructor makes them, on the CPU.

    Random numbers come from the global generator. Other parameters are not kept in memory.

    Args:
        chain: Where the first module cannot be built again, the next one is, and so on up to the model itself.
        leaves: Names of parameters, buffers or tensor attributes.
        built: Modules built again so far, by the id of the original. Read and added to: for buffers only.

    Raises:
        ValueError: No module of the chain can be built again, or what comes out differs from the original. The message
            is about the first module.
    """
    first: ValueError | None = None
    for path, module in chain:
        try:
            again = None if built is None else built.get(id(module))
            if again is None:
                again = _build_again(module, type(chain[0][1]), leaves)
                if built is not None:
                    built[id(module)] = again
            return _read(chain[0][1], again.get_submodule(path), leaves)
        except ValueError as err:
            first = first or err
    assert first is not None
    raise first


def _build_again(module: nn.Module, owner: type, leaves: Sequence[str]) -> nn.Module:
    cls = original_class(module)
    arguments = _constructor_arguments(module, cls)
    try:
        with torch.device("cpu"), _parameters_on_meta(owner, leaves):
            again = cls(**arguments)
    except Exception as err:
        raise ValueError(f"building it again raised {type(err).__name__}: {err}") from err
    _check_same_attributes(module, again)
    return again


def _check_same_attributes(module: nn.Module, again: nn.Module) -> None:
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training" or not isinstance(value, _PLAIN):
            continue
        if name not in vars(again) or vars(again)[name] != value:
            other = repr(vars(again).get(name, "absent"))
            raise ValueError(
                f"building it again gives {name}={other} instead of {value!r}, so its attributes are not its "
                "constructor's arguments"
            )


def _read(module: nn.Module, again: nn.Module, leaves: Sequence[str]) -> dict[str, Tensor]:
    _check_same_attributes(module, again)
    values: dict[str, Tensor] = {}
    for leaf in leaves:
        want, got = getattr(module, leaf), getattr(again, leaf, None)
        if not isinstance(got, Tensor) or got.is_meta or (got.shape, got.dtype) != (want.shape, want.dtype):
            raise ValueError(f"building it again does not give a real {leaf} of shape {tuple(want.shape)}")
        values[leaf] = got.detach()
    return values


def _constructor_arguments(module: nn.Module, cls: type) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if name == "device":
            if parameter.default is parameter.empty:
                arguments[name] = torch.device("cpu")
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"its constructor takes {parameter}, so it cannot be built again")
        elif name in vars(module):
            arguments[name] = vars(module)[name]
        elif not (name == "dtype" and parameter.default is None):
            raise ValueError(
                f"its constructor argument {name!r} is not kept as an attribute, so it cannot be built again"
            )
    return arguments


@contextmanager
def _parameters_on_meta(cls: type, keep: Sequence[str]) -> Generator[None]:
    """Modules built inside have their parameters on meta, but for those named ``keep`` of modules of class ``cls``.

    It replaces a method of `nn.Module` meanwhile, so no other thread may build modules at the same time.
    """
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and not (type(self) is cls and name in keep):
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
