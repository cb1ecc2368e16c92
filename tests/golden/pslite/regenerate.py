"""Records what byteps 0.2.5.post15 sends: ``python tests/golden/pslite/regenerate.py --yes`` runs its worker on psgc's scheduler and server, then psgc's
worker on its scheduler and server, and writes messages.json: each message's sender, its frames as they came, and what its fields are.

Ports, ids and pointers differ between runs, so the tests hold the recorded bytes against the recorded fields. Builds byteps (tests/pslite/stock.py).
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from psgc.pslite import KVMeta, KVPairs, KVServer, KVWorker, Postoffice, Settings
from psgc.pslite.byteps.registration import Registration
from psgc.pslite.meta import COMMANDS, META_FIELDS, read_meta
from psgc.pslite.nodes import sender_of
from tests.pslite.stock import StockCompressor

OUT = Path(__file__).with_name("messages.json")
VALUES = np.linspace(-3, 4, 40, dtype=np.float32)
REGISTRATION = b"2 compressor_k 3 compressor_type topk"
WORKER = f"""
from tests.pslite.stock import StockCompressor, StockWorker
import numpy as np, time
values = np.linspace(-3, 4, 40, dtype=np.float32)
worker = StockWorker()
key = (5 << 16) + 1
worker.push(0, key, values.tobytes())
worker.push(0, key, {REGISTRATION!r}, 3)
worker.push(0, key, StockCompressor({REGISTRATION.decode()!r}, 40).encode(values))
worker.pull(0, key, 160)
time.sleep(1.2)
worker.finish()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Recorder:
    """Every multipart message that a ZeroMQ socket of this process receives while it is active."""

    def __init__(self) -> None:
        self.came: list[list[bytes]] = []
        self._plain = zmq.Socket.recv_multipart

    def __enter__(self) -> Recorder:
        recorder = self

        def receive(socket: Any, *args: Any, **more: Any) -> Any:
            frames = recorder._plain(socket, *args, **more)
            recorder.came.append([bytes(frame.buffer) for frame in frames])
            return frames

        zmq.Socket.recv_multipart = receive  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        zmq.Socket.recv_multipart = self._plain  # type: ignore[method-assign]


# Not both at once: byteps's worker then aborts when it ends ("Check failed: ready_").
RESEND = {"PS_RESEND": "1", "PS_RESEND_TIMEOUT": "5000"}
HEARTBEAT = {"PS_HEARTBEAT_INTERVAL": "1"}


def environment(role: str, port: int, settings: dict[str, str]) -> dict[str, str]:
    more = {
        "DMLC_ROLE": role, "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
    }  # fmt: skip
    return {**os.environ, **more, **settings}


def office(role: Any, port: int, settings: dict[str, str]) -> Postoffice:
    listen, resend_s = port if role == "scheduler" else 0, 5.0 if settings is RESEND else 0.0
    heartbeat_s = 0.0 if resend_s else 1.0
    return Postoffice(
        Settings(
            role=role, workers=1, servers=1, root_host="127.0.0.1", root_port=port, port=listen, resend_s=resend_s, heartbeat_s=heartbeat_s
        )
    )


def answer(meta: KVMeta, pairs: KVPairs, server: KVServer) -> None:
    payload = memoryview(VALUES[:6].tobytes())
    server.response(meta, KVPairs() if meta.push else KVPairs(pairs.keys, payload, (len(payload),)))


def with_stock_worker(settings: dict[str, str]) -> list[list[bytes]]:
    port = free_port()
    scheduler, serving = office("scheduler", port, settings), office("server", port, settings)
    KVServer(serving).set_request_handle(answer)
    with Recorder() as recorder:
        threads = [threading.Thread(target=lambda each=each: (each.start(), each.finalize())) for each in (scheduler, serving)]
        for thread in threads:
            thread.start()
        subprocess.run([sys.executable, "-c", WORKER], env=environment("worker", port, settings), check=True, timeout=300)
        for thread in threads:
            thread.join(20)
    return recorder.came


def with_stock_server(settings: dict[str, str]) -> list[list[bytes]]:
    port = free_port()
    command = [sys.executable, "-m", "tests.pslite.stock"]
    roles = [subprocess.Popen(command, env=environment(role, port, settings)) for role in ("scheduler", "server")]
    with Recorder() as recorder:
        own = office("worker", port, settings)
        worker = KVWorker(own)
        own.start()
        key, raw = ((5 << 16) + 1,), VALUES.tobytes()
        worker.wait(worker.push(key, raw, (160,)), 20)
        worker.wait(worker.push(key, raw, (160,)), 20)
        worker.wait(worker.pull(key, 160), 20)
        threading.Event().wait(1.2)
        own.finalize()
    for role in roles:
        role.wait(20)
    return recorder.came


def described(who: str, frames: list[bytes], seen: set[str]) -> dict[str, Any] | None:
    """One message; None for one of a kind that ``who`` has sent before. Only what the stock process sent: its parts are told by their senders."""
    identity, meta_frame, *data = frames
    meta = read_meta(meta_frame)
    kind = COMMANDS[meta.command] if meta.command else ("push" if meta.push else "pull")
    name = f"{who}: {kind} {'request' if meta.request else 'reply'}" + (f" cmd {meta.head}" if not meta.command and meta.request else "")
    name += f", {len(meta_frame)} bytes, {[len(part) for part in data]}"
    if name in seen:
        return None
    seen.add(name)
    fields = {field.name: getattr(meta, field.name) for field in META_FIELDS if hasattr(meta, field.name)}
    listed = [
        {"role": n.role, "id": n.id, "hostname": n.hostname, "port": n.port, "is_recovery": n.is_recovery, "customer_id": n.customer_id}
        for n in meta.nodes
    ]
    return {
        "name": name, "identity": identity.decode("latin-1"), "meta": meta_frame.hex(), "data": [part.hex() for part in data],
        "fields": fields, "nodes": listed,
        "data_types": list(meta.data_types),
    }  # fmt: skip


SPECS = (
    "compressor_type=onebit compressor_onebit_scaling=true", "compressor_type=onebit", "compressor_type=topk compressor_k=0.1",
    "compressor_type=topk compressor_k=1", "compressor_type=randomk compressor_k=0.1 seed=9", "compressor_type=dithering compressor_k=4 seed=3",
    "compressor_type=dithering compressor_k=2 seed=3 dithering_normalize=1", "compressor_type=dithering compressor_k=4 seed=5 dithering_partition=1",
    "compressor_type=dithering compressor_k=3 seed=5 dithering_partition=1 dithering_normalize=1",
)  # fmt: skip


def payloads() -> list[dict[str, Any]]:
    """Three steps of each compressor on parts of 100 and 33 elements: what goes in, and BytePS's bytes."""
    found = []
    for spec, numel in itertools.product(SPECS, (100, 33)):
        settings = dict(pair.split("=") for pair in spec.split())
        stock = StockCompressor(Registration.of(settings).text().decode(), numel)
        for step in range(3):
            values = np.random.default_rng(step).normal(scale=10.0 ** (step - 1), size=numel).astype(np.float32)
            payload = stock.encode(values)
            more = {"payload": payload.hex(), "decoded": stock.decode(payload).tobytes().hex()}
            found.append({"settings": settings, "numel": numel, "step": step, "values": values.tobytes().hex(), **more})
    return found


def main() -> None:
    if "--yes" not in sys.argv:
        sys.exit("this writes messages.json and payloads.json; say --yes")
    OUT.with_name("payloads.json").write_text(json.dumps(payloads(), indent=1) + "\n")
    if "--payloads" in sys.argv:
        return
    seen: set[str] = set()
    messages = []
    runs = [(run(settings), roles) for settings in (RESEND, HEARTBEAT) for run, roles in
            ((with_stock_worker, {9: "worker"}), (with_stock_server, {1: "scheduler", 8: "server"}))]  # fmt: skip
    for came, roles in runs:
        for frames in came:
            sender = sender_of(frames[0])
            joining = read_meta(frames[1]).nodes
            who = roles.get(sender) or ("worker" if sender > 100 and 9 in roles and joining and joining[0].role == 1 else "")
            found = described(f"stock {who}", frames, seen) if who else None
            if found is not None:
                messages.append(found | ({"identity": ""} if sender > 100 else {}))
    OUT.write_text(json.dumps(messages, indent=1) + "\n")


if __name__ == "__main__":
    main()
