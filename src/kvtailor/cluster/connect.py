"""From the words of a command line to the executor on that Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

from kvtailor.cluster.contract import Executor
from kvtailor.errors import KvtailorError

__all__ = ["HERE", "connect"]

HERE = "here"
"""Stands for: the cluster that this machine belongs to, or else a new one of this machine alone."""
_SECONDS = 10.0


def connect(address: str = HERE, *, environment: Mapping[str, str] | None = None) -> Executor:
    """Return an executor on a Ray cluster; its `close` leaves the cluster, and ends one that was started here.

    Where this process is connected already, that connection is taken as it is and stays.

    Args:
        address: `HERE`; `local`, a new cluster of this machine alone; `auto`, a cluster that must be there; `HOST:PORT`
            of a head node, on a machine of the cluster; `ray://HOST:PORT` from outside.
        environment: variables for the workers.

    Raises:
        KvtailorError: Ray is not installed, or there is no such cluster.
    """
    # Nothing is sent to the makers of Ray unless the user has asked for it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray

        from kvtailor.cluster.on_ray import OnRay
    except ImportError as error:
        raise KvtailorError(
            f"asked for Ray, which cannot be imported here ({error}): run `pip install 'kvtailor[ray]'`"
        ) from error
    if ray.is_initialized():
        return OnRay()
    try:
        _answers(address)
        ray.init(
            address=None if address == HERE else address,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": dict(environment)} if environment else None,
        )
    # Whatever Ray does not like about an address or a token, it raises one of these.
    except (ConnectionError, RuntimeError, ValueError, ImportError, OSError, ray.exceptions.RayError) as error:
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise KvtailorError(
            f"asked for the Ray cluster {address!r}, which cannot be reached: {reason.rstrip('.')}. Start a head with "
            "`ray start --head --port 6379` and give HOST:6379; with RAY_AUTH_MODE=token every machine needs the same "
            "token"
        ) from error
    return OnRay(disconnect=True)


def _answers(address: str) -> None:
    """Return where something listens at an address with a port: Ray itself would try for minutes.

    Raises:
        OSError: nothing does.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS).close()
