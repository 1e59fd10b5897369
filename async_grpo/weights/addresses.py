"""Which of this machine's network addresses serves what."""

import socket

from async_grpo.errors import ConfigError


def address_facing(host: str, port: int) -> str:
    """Of this machine's addresses, the one from which packets to `host` go out.

    Raises:
        OSError: `host` is not known, or no network leads there.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def listening_socket(host: str) -> socket.socket:
    """A socket that listens at `host`, and only there, on a port chosen by the system.

    Raises:
        OSError: `host` is not known, or is no address of this machine.
    """
    family, *_, target = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(target, family=family)


def require_own_address(field: str, host: str) -> None:
    """Raise ConfigError, naming `field`, if this machine cannot listen at `host`."""
    try:
        listening_socket(host).close()
    except OSError as error:
        raise ConfigError(
            f"{field}: cannot listen at {host}: {error.strerror}; give an address of the trainer's "
            "machine that the others can reach"
        ) from error


def is_own_address(host: str) -> bool:
    """Whether `host` is an address of this machine."""
    try:
        listening_socket(host).close()
    except OSError:
        return False
    return True
