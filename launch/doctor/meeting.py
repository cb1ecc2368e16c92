"""The machines of a job meet at the scheduler's address, before the job: each tells its facts, tries to reach the servers, and is told all faults.

    scheduler's machine -> other   nonce, its proof comes later
    other -> scheduler's           nonce, proof; then up to PINGS empty messages that are answered with the clock, then its facts and its port
    scheduler's -> other           once all are there: its own proof was right; where to connect
    other -> scheduler's           whom it could not reach
    scheduler's -> other           the findings

Messages are JSON with a length in front, bounded in size. Proofs are HMACs under PSGC_TOKEN over both nonces; the token does not travel. Who has
another token is refused, and named.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from psgc.config import Config
from psgc.errors import PsgcError, RemoteProtocolError
from psgc.launch.doctor.compare import Finding, Unreached, compare, complete, to_json
from psgc.launch.doctor.facts import Facts
from psgc.processes.addresses import join, listening_socket, split, unmapped

MAX_BYTES: Final = 1 << 20  # of a message
MAX_GUESTS: Final = 4096
PINGS: Final = 8
ANSWER_S: Final = 10.0  # a machine that says nothing for so long has gone
PROBE_S: Final = 3.0
RETRY_S: Final = 0.3
_LENGTH: Final = struct.Struct("<I")


class Talk:
    """Messages over one connection."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        link.settimeout(ANSWER_S)

    def send(self, document: Any) -> None:
        body = json.dumps(document).encode()
        self.link.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, within_s: float = ANSWER_S) -> Any:
        """Raises RemoteProtocolError for what is no message, OSError if none comes."""
        self.link.settimeout(within_s)
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if size > MAX_BYTES:
            raise RemoteProtocolError(f"a message of {size} bytes; is something else than `psgc doctor --job` at that port?")
        try:
            return json.loads(self._read(size))
        except ValueError:
            raise RemoteProtocolError("a message that is no JSON; is something else than `psgc doctor --job` at that port?") from None

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if not (more := self.link.recv(size - len(data))):
                raise ConnectionError("it has closed the connection")
            data += more
        return bytes(data)


def proof(token: str, who: str, nonces: Sequence[str]) -> str:
    return hmac.new(token.encode() or b"none", "/".join(["psgc doctor", who, *nonces]).encode(), "sha256").hexdigest()


class Door:
    """A port of this machine that others try to reach; it says its name to whoever connects."""

    def __init__(self, port: int) -> None:
        self.name = os.urandom(8).hex()
        self._socket = listening_socket(port)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return
            with link:
                link.settimeout(PROBE_S)
                try:
                    link.sendall(self.name.encode())
                except OSError:
                    continue

    def close(self) -> None:
        self._socket.close()


@dataclass(slots=True)
class Guest:
    """A machine that has come to the scheduler's, or that one itself. host, port: where its servers would be reached."""

    facts: Facts
    host: str
    port: int
    door: str
    talk: Talk | None = None

    @property
    def target(self) -> dict[str, Any]:
        return {"name": self.facts.name, "host": self.host, "port": self.port, "door": self.door}


def unreached_from(source: str, targets: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Try to connect to each target; those that failed, with the reason."""
    failed = []
    for target in targets:
        host, port = str(target["host"]), int(target["port"])
        try:
            with socket.create_connection((host, port), timeout=PROBE_S) as link:
                link.settimeout(PROBE_S)
                said = b""
                while len(said) < len(str(target["door"])) and (more := link.recv(64)):
                    said += more
            error = "" if said.decode(errors="replace") == target["door"] else "something else answers there"
        except TimeoutError:
            error = "nothing comes back from there"
        except OSError as failure:
            error = failure.strerror or str(failure)
        if error:
            failed.append({"source": source, "target": str(target["name"]), "address": join(host, port), "error": error})
    return failed


def host_meeting(config: Config, own: Facts, wait_s: float, tell: Callable[[str], None]) -> list[Finding]:
    """The part of the scheduler's machine: wait for the others, compare their facts, and send them the findings. Raises PsgcError if the scheduler's port is
    taken."""
    door = Door(config.port if "server" in own.roles else 0)
    guests = [Guest(own, _host_for(config, own, "127.0.0.1"), _port_for(config, own, door), door.name)]
    strangers: list[str] = []
    lock, done = threading.Lock(), threading.Event()
    try:
        listener = listening_socket(config.root_port)
    except PsgcError as error:
        door.close()
        raise PsgcError(f"doctor: {error} `psgc doctor --job` meets there before the job is started") from None

    def greet(link: socket.socket, peer: str) -> None:
        try:
            guest = _greet(Talk(link), peer, config.token)
        except (RemoteProtocolError, OSError, ValueError, KeyError, TypeError) as error:
            link.close()
            if isinstance(error, PermissionError):
                with lock:
                    strangers.append(peer)
            return
        with lock:
            guests.append(guest)
            if complete([each.facts for each in guests]):
                done.set()

    def accept() -> None:
        for _ in range(MAX_GUESTS):
            try:
                link, address = listener.accept()
            except OSError:
                return
            threading.Thread(target=greet, args=(link, unmapped(str(address[0]))), daemon=True).start()

    if complete([own]):
        done.set()
    threading.Thread(target=accept, daemon=True).start()
    tell(f"waiting for the job's other machines at port {config.root_port}, {wait_s:g} s at most")
    done.wait(wait_s)
    with lock:
        present, refused = list(guests), sorted(set(strangers))
    found = _examine(present, config.servers, refused)
    for guest in present:
        if guest.talk is not None:
            try:
                guest.talk.send({"findings": to_json(found)})
            except OSError:
                continue
            guest.talk.link.close()
    listener.close()
    door.close()
    return found


def _examine(present: Sequence[Guest], servers: int, strangers: Sequence[str]) -> list[Finding]:
    """Have everyone try to reach the servers (without servers: each worker), then compare."""
    targets = [guest.target for guest in present if "server" in guest.facts.roles or (not servers and "worker" in guest.facts.roles)]
    probing = [guest for guest in present if "worker" in guest.facts.roles]
    failed: list[dict[str, str]] = []
    gone: list[Finding] = []

    def ask(guest: Guest) -> None:
        others = [target for target in targets if target["door"] != guest.door]
        if guest.talk is None:
            failed.extend(unreached_from(guest.facts.name, others))
            return
        try:
            guest.talk.send({"targets": others})
            answer = guest.talk.receive(ANSWER_S + PROBE_S * len(others))
            failed.extend({key: str(each[key]) for key in ("source", "target", "address", "error")} for each in answer["unreached"])
        except (OSError, RemoteProtocolError, KeyError, TypeError) as error:
            gone.append(
                Finding("members", guest.facts.name, f"left while servers were tried: {error}", "look at its output, and run it again")
            )

    threads = [threading.Thread(target=ask, args=(guest,), daemon=True) for guest in probing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = sorted(failed, key=lambda each: (each["source"], each["target"]))
    return [*compare([guest.facts for guest in present], [Unreached(**each) for each in failures], strangers), *gone]


def _greet(talk: Talk, peer: str, token: str) -> Guest:
    """A machine that has connected. Raises PermissionError if it has another token."""
    nonce = os.urandom(16).hex()
    talk.send({"nonce": nonce})
    first = talk.receive()
    nonces = (nonce, str(first["nonce"]))
    if not hmac.compare_digest(str(first["proof"]), proof(token, "guest", nonces)):
        talk.send({"refused": "PSGC_TOKEN here is not the scheduler's: set it to the same text on every machine"})
        raise PermissionError(peer)
    talk.send({"proof": proof(token, "host", nonces)})
    for _ in range(PINGS):
        talk.receive()
        talk.send({"clock": time.time()})
    told = talk.receive()
    facts = Facts.from_json(told["facts"])
    return Guest(facts, str(told["host"]) or peer, int(told["port"]), str(told["door"]), talk)


def join_meeting(config: Config, own: Facts, wait_s: float, tell: Callable[[str], None]) -> list[Finding]:
    """The part of any other machine: send its facts to the scheduler's machine, and return all machines' findings. Raises PsgcError if nobody answers."""
    door = Door(config.port if "server" in own.roles else 0)
    where = join(config.root_host, config.root_port)
    tell(f"waiting for the scheduler's machine at {where}, {wait_s:g} s at most")
    try:
        with _connected(config, where, wait_s) as link:
            talk = Talk(link)
            hello = talk.receive()
            nonces = (str(hello["nonce"]), os.urandom(16).hex())
            talk.send({"nonce": nonces[1], "proof": proof(config.token, "guest", nonces)})
            answer = talk.receive()
            if "refused" in answer:
                raise PsgcError(f"doctor: {where} refuses this machine: {answer['refused']}")
            if not hmac.compare_digest(str(answer["proof"]), proof(config.token, "host", nonces)):
                raise PsgcError(f"doctor: {where} does not have this machine's PSGC_TOKEN: set it to the same text on every machine")
            facts = replace(own, clock_s=_clock(talk))
            talk.send(
                {"facts": facts.to_json(), "host": _host_for(config, own, ""), "port": _port_for(config, own, door), "door": door.name}
            )
            message = talk.receive(wait_s + ANSWER_S)
            if "targets" in message:
                talk.send({"unreached": unreached_from(own.name, message["targets"])})
                message = talk.receive(wait_s + ANSWER_S)
            return [Finding(**each) for each in message["findings"]]
    except (OSError, RemoteProtocolError, KeyError, TypeError) as error:
        raise PsgcError(
            f"doctor: the meeting at {where} broke off: {error}; run `psgc doctor --job` with DMLC_ROLE=scheduler there"
        ) from None
    finally:
        door.close()


def _connected(config: Config, where: str, wait_s: float) -> socket.socket:
    until = time.monotonic() + wait_s
    while True:
        try:
            return socket.create_connection((config.root_host, config.root_port), timeout=PROBE_S)
        except OSError as error:
            if time.monotonic() > until:
                reason = "nothing comes back from there" if isinstance(error, TimeoutError) else error.strerror or str(error)
                raise PsgcError(
                    f"doctor: {where} (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT): {reason}; run `psgc doctor --job` with DMLC_ROLE=scheduler there at the same "
                    f"time, and open the port in the firewalls in between"
                ) from None
            time.sleep(RETRY_S)


def _clock(talk: Talk) -> float:
    """This clock minus the other's, from the quickest of some round trips."""
    trips = []
    for _ in range(PINGS):
        began = time.time()
        talk.send({})
        theirs = float(talk.receive()["clock"])
        ended = time.time()
        trips.append((ended - began, (began + ended) / 2 - theirs))
    return min(trips)[1]


def _host_for(config: Config, own: Facts, default: str) -> str:
    """Where others reach this machine, as far as it knows; "": the address that it is seen at."""
    if config.advertise and "server" in own.roles:
        return split(config.advertise)[0]
    if config.node_host and "server" in own.roles:
        return config.node_host
    return config.root_host if default else ""


def _port_for(config: Config, own: Facts, door: Door) -> int:
    return split(config.advertise)[1] if config.advertise and "server" in own.roles else door.port
