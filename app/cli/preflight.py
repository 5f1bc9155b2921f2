"""What a service needs before it loads its model: a folder that it may write, and ports that are free."""

from __future__ import annotations

import os
import ssl
import tempfile

from boxcal.app.cli.output import CannotStart
from boxcal.app.settings.service import Settings

SERVICE_SECONDS = 2.0


LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - addresses that mean all


def check_start(settings: Settings) -> None:
    """Check what would otherwise fail after the model has been loaded."""
    folder = settings.data_dir.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CannotStart(f"BOXCAL_DATA_DIR: cannot write to {folder}: {error.strerror}") from error
    check_port(settings)


class AlreadyRuns(CannotStart):
    """A boxcal listens on the port; the message says what it serves."""


def check_port(settings: Settings) -> str:
    """Read the files of TLS, listen on the addresses for a moment, and say that they are free."""
    check_tls(settings)
    if settings.uds is not None:
        folder = settings.uds.absolute().parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CannotStart(f"{folder}, the folder of the socket, is not writable")
        found = f"{settings.uds} can be created"
    else:
        address = f"{settings.host_of_urls}:{settings.port}"
        try:
            settings.listen(settings.port).close()
        except OSError as error:
            if (served := running_model(settings)) is not None:
                raise AlreadyRuns(
                    f"{address} is in use by a running boxcal, which serves {served}"
                ) from error
            raise CannotStart(f"cannot listen on {address}: {error.strerror or error}") from error
        found = f"{address} is free"
    if settings.grpc_port is None:
        return found
    address = f"{settings.host_of_urls}:{settings.grpc_port}"
    try:
        settings.listen(settings.grpc_port).close()
    except OSError as error:
        raise CannotStart(f"cannot listen on {address} for gRPC: {error.strerror or error}") from error
    return f"{found}; {address} is free for gRPC"


def check_tls(settings: Settings) -> None:
    """Load the certificate, its key and the authorities of clients, if there are any."""
    if settings.tls_cert is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = f"BOXCAL_TLS_CERT, {settings.tls_cert}, and BOXCAL_TLS_KEY, {settings.tls_key}"
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
        if settings.tls_client_ca is not None:
            files = f"BOXCAL_TLS_CLIENT_CA, {settings.tls_client_ca}"
            context.load_verify_locations(settings.tls_client_ca)
    except (OSError, ValueError) as error:
        raise CannotStart(f"{files}, cannot be loaded: {error}") from error


def running_model(settings: Settings) -> str | None:
    """Return the model of the boxcal that listens on the address; None if something else does."""
    from boxcal.app.client import BoxcalClient, calls  # noqa: PLC0415 - only after a failure
    from boxcal.app.client.clients import ONCE  # noqa: PLC0415
    from boxcal.app.client.errors import ClientError  # noqa: PLC0415

    host = LOOPBACK.get(settings.address, settings.host_of_urls)
    try:
        with BoxcalClient(f"http://{host}:{settings.port}", timeout=SERVICE_SECONDS) as client:
            return client.send(calls.ready(), ONCE).model
    except ClientError:
        return None
