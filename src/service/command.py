"""The command `service`: reads the base, starts a server for samples, and answers clients."""

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web
from transformers import AutoTokenizer

from cairn.checkpoint.store import CheckpointStore
from cairn.config.service import KEY_PREFIX, ServiceConfig, TenantConfig
from cairn.run.conversations import end_tokens
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import make_folders
from cairn.run.locked_folder import lock
from cairn.run.output import printable
from cairn.run.signals import on_stop_signals
from cairn.service.api import ServiceApi
from cairn.service.helpers import PassHelpers
from cairn.service.ledger import ServiceLedger
from cairn.service.sampler import SampleServer
from cairn.service.trainees import AdapterBase, one_rank
from cairn.service.worker import CallWorker

logger = logging.getLogger(__name__)

LEDGER = "service.sqlite"
KEY = "key"
"""File in the output folder with the key of the one tenant that there is if none are given."""
SHORTEST_KEY = 20
LOCAL = TenantConfig(name="local", key_file=KEY, models=64, calls=4096, stored="1T")


def serve(config: ServiceConfig, folder: Path) -> int:
    """Serve until a stop signal comes; returns the exit code.

    Args:
        folder: of the base, with its weights.

    Raises:
        UsageError: a setting, a key or the model can't be used.
    """
    output = Path(config.output_dir)
    make_folders(output / "logs")
    keys = keys_of(config)
    run = RunDirectory(output)
    lock(run)
    try:
        with (
            contextlib.closing(_listen(config)) as listener,
            PassHelpers(config, folder) as helpers,
            one_rank(config) as group,
        ):
            base = AdapterBase(config, folder, group, helpers)
            ledger = ServiceLedger(output / LEDGER, base.digest)
            with contextlib.closing(ledger):
                asyncio.run(_serve(config, folder, listener, base, ledger, keys))
    finally:
        run.unlock()
    return 0


async def _serve(
    config: ServiceConfig,
    folder: Path,
    listener: socket.socket,
    base: AdapterBase,
    ledger: ServiceLedger,
    keys: Mapping[str, TenantConfig],
) -> None:
    names = config.names or list(dict.fromkeys([config.model.name, folder.name]))
    tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, str(folder))
    ends = tuple(end_tokens(folder, tokenizer.eos_token_id))
    api = ServiceApi(config, names, folder, keys, ledger, ends)
    worker = CallWorker(config, {one.name: one for one in keys.values()}, base, ledger, api.finished)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    sampler = None
    if config.sampling != "off":
        sampler = SampleServer(config, folder, await asyncio.to_thread(_plain, config, base))

    def stop(_: str) -> None:
        loop.call_soon_threadsafe(stopped.set)

    with on_stop_signals(stop):
        try:
            if sampler is not None:
                await sampler.start()
            runner = web.AppRunner(api.app(), access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            api.begin(worker, sampler)
            await web.SockSite(runner, listener).start()
            _say(config, listener, names)
            await stopped.wait()
            await runner.cleanup()
            await api.end()
            await asyncio.to_thread(worker.close)
        finally:
            if sampler is not None:
                await sampler.close()


def _say(config: ServiceConfig, listener: socket.socket, names: list[str]) -> None:
    host, port = listener.getsockname()[:2]
    print(printable(f"serving {names[0]}; its clients find it with"), flush=True)
    print(f"export TINKER_BASE_URL=http://{host}:{port}", flush=True)
    if not config.tenants:
        path = Path(config.output_dir) / KEY
        print(printable(f"export TINKER_API_KEY=$(cat {path})"), flush=True)
    print("Ctrl-C ends it; the same command goes on where it was", flush=True)


def _plain(config: ServiceConfig, base: AdapterBase) -> Path:
    """The folder of the adapter of zeros, made anew at each start."""
    store = CheckpointStore(Path(config.output_dir) / "base")
    shutil.rmtree(store.root, ignore_errors=True)
    return base.plain.write(store, 1, {}, training=False)


def keys_of(config: ServiceConfig) -> dict[str, TenantConfig]:
    """The tenants, by the SHA-256 of their keys; if none are given, there is one, whose key is made.

    Raises:
        UsageError: a key is missing, too short, or the key of two tenants.
    """
    found: dict[str, TenantConfig] = {}
    tenants = config.tenants
    if not tenants:
        path = Path(config.output_dir) / KEY
        if not path.exists():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{KEY_PREFIX}{secrets.token_urlsafe(32)}\n")
        tenants = [LOCAL.model_copy(update={"key_file": str(path)})]
    for tenant in tenants:
        where = f"tenants {tenant.name!r}: key_variable = {tenant.key_variable}"
        if tenant.key_variable is not None:
            key = os.environ.get(tenant.key_variable, "")
        else:
            where = f"tenants {tenant.name!r}: key_file = {tenant.key_file}"
            try:
                key = Path(tenant.key_file or "").read_text().strip()
            except OSError as error:
                raise UsageError(f"{where}: {error.strerror}") from None
        if not key.startswith(KEY_PREFIX) or len(key) < SHORTEST_KEY:
            raise UsageError(
                f"{where}: holds no key; it has to begin with {KEY_PREFIX}, which clients want, and have "
                f"{SHORTEST_KEY} characters or more"
            )
        digest = hashlib.sha256(key.encode()).hexdigest()
        if digest in found:
            raise UsageError(f"{where}: is also the key of {found[digest].name!r}; each tenant needs its own")
        found[digest] = tenant
    return found


def _listen(config: ServiceConfig) -> socket.socket:
    """A socket at the address that the settings give.

    Raises:
        UsageError: it is taken, or not of this machine.
    """
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((config.host, config.port), family=family, backlog=1024)
    except OSError as error:
        taken = "; another program listens there" if error.errno == errno.EADDRINUSE else ""
        raise UsageError(
            f"--host {config.host} --port {config.port}: {error.strerror}{taken}; give another --port"
        ) from None
