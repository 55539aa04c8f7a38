"""Environment variables that decide how ranks find each other, checked before a library would fail on them. No torch."""

import os
import socket
import time
from collections.abc import Mapping

_RESOLVE_S = 60.0  # a name may become known after the machine that has it has started


def check_environment(environ: Mapping[str, str] = os.environ, *, cuda: bool = False) -> None:
    """Refuse variables that OpenMP, gloo or NCCL cannot use.

    Args:
        environ: The variables.
        cuda: Whether NCCL is used.

    Raises:
        ValueError: One cannot be used; the message names it.
    """
    if "OMP_NUM_THREADS" in environ:
        whole_number("OMP_NUM_THREADS", environ, least=1)
    known = [name for _, name in socket.if_nameindex()]
    names = ["GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if cuda else [])]
    for variable in names:
        asked = environ.get(variable, "")
        if not asked or asked.startswith("^"):  # NCCL: all but these
            continue
        if variable.startswith("GLOO"):
            fits = all(name in known for name in asked.split(","))
        else:  # NCCL takes the first that one of these begins, or is where a = stands before
            exact, wanted = asked.startswith("="), asked.removeprefix("=").split(",")
            fits = any(name == one if exact else name.startswith(one) for name in known for one in wanted)
        if not fits:
            raise ValueError(
                f"{variable}={asked!r} is not a network interface of this machine, which has {', '.join(known)}. Name one of "
                "them, or unset the variable."
            )


def whole_number(name: str, environ: Mapping[str, str], *, least: int, most: int | None = None) -> int:
    """The value of a variable.

    Raises:
        ValueError: It is missing, not a whole number, or out of range.
    """
    text = environ.get(name, "").strip()
    if (
        text.isascii()
        and text.isdigit()
        and len(text) < 10
        and least <= int(text)
        and (most is None or int(text) <= most)
    ):
        return int(text)
    reach = f"from {least} on" if most is None else f"from {least} to {most}"
    raise ValueError(
        f"the environment variable {name}={environ.get(name, '')!r} must be a whole number {reach}. Correct or unset it."
    )


def check_meeting_place(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a ``MASTER_ADDR`` and ``MASTER_PORT`` at which no rank could meet another.

    Raises:
        ValueError: The port is not one, or the address is still unknown after a minute.
    """
    port = whole_number("MASTER_PORT", environ, least=1, most=65535)
    address = environ.get("MASTER_ADDR", "")
    until = time.monotonic() + _RESOLVE_S
    while True:
        try:
            if not address:
                raise OSError("it is empty")
            socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as err:
            if not address or time.monotonic() > until:
                raise ValueError(
                    f"MASTER_ADDR={address!r} is not an address that this machine knows ({err}). Name the host of rank 0."
                ) from None
        time.sleep(1.0)
