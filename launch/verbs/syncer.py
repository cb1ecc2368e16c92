"""The verb ``psgc syncer``: the process around which learners train that wait for nobody."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from psgc.errors import ConfigError, UsageError
from psgc.launch.files import check_place
from psgc.launch.flags import Json


def syncer(
    listen: Annotated[
        str, typer.Option(help="host:port, or a port at all addresses, where learners connect; port 0: a free one.")
    ] = "127.0.0.1:0",
    rule: Annotated[str, typer.Option(help="How what learners push is applied; learners=: how many are expected.")] = "delayed:learners=2",
    learners: Annotated[
        Path | None, typer.Option(help="File of names and tokens, read again when it changes; else all who have PSGC_TOKEN.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="File of the outer parameters: written now and then, and gone on from at start.")
    ] = None,
    save_every: Annotated[float, typer.Option(help="Seconds between two savings.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Hold the outer parameters of learners that come, go and train at speeds of their own (psgc.torch.Decoupled).

    Example: psgc syncer --listen 0.0.0.0:9140 --learners tokens.txt --rule delayed:learners=4 --save outer.npz
    """
    from psgc.config import Config
    from psgc.diagnostics.lines import log_everything
    from psgc.layout.update_rule import UpdateRule
    from psgc.processes.addresses import is_loopback, join
    from psgc.processes.descriptors import raise_limit
    from psgc.server.syncer.loop import Settings, serve
    from psgc.transport.security import encryption

    host, port = _address(listen)
    parsed = UpdateRule.parse(rule)
    if parsed.in_rounds or parsed.staleness >= 0:
        raise UsageError(f"syncer: --rule {rule}: rounds and bounds make learners wait; choose delayed, or one with round=0")
    if not 0 < save_every < float("inf"):
        raise UsageError(f"syncer: --save-every {save_every:g}: expected seconds above 0")
    check_place(save, "syncer: --save")
    config = Config.from_env(role="server", log_level="info")
    if learners is None and not config.token and not (host and is_loopback(host)):
        raise ConfigError(
            f"syncer: --listen {listen}: other machines reach it; give --learners a file of tokens, or set PSGC_TOKEN here and at every learner"
        )
    if config.encrypt:
        encryption.require()
    log_everything(config)
    logging.getLogger("psgc").setLevel(logging.INFO)
    raise_limit()

    def told(port: int) -> None:
        where = join(host or "0.0.0.0", port)
        print(
            json.dumps({"address": where, "rule": parsed.canonical})
            if as_json
            else f"learners connect to {where}; rule {parsed.canonical}",
            flush=True,
        )

    serve(config, Settings(host, port, parsed, learners, save, save_every), told)


def _address(listen: str) -> tuple[str, int]:
    """Host ("": all addresses) and port. Raises UsageError."""
    from psgc.processes.addresses import bare_host

    host, colon, port = listen.rpartition(":")
    try:
        number = int(port)
        if not 0 <= number < 1 << 16:
            raise ValueError
        found = bare_host(host) if colon else ""
    except ValueError:
        raise UsageError(f"syncer: --listen {listen}: expected host:port, or a port") from None
    return ("" if found in ("0.0.0.0", "::", "*") else found), number
