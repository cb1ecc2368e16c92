"""``psgc.ray.launch``: a whole job on a Ray cluster, from one call to its end.

A placement group has a bundle for each worker and each server; where servers follow from the nodes that workers are on, they have a group of their own,
which is placed once workers are. Workers are actors that run the function; the scheduler, beside rank 0, and the servers are
actors that serve until the job ends. All of them end with the call, however it ends.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from psgc.config import Config
from psgc.errors import ConfigError, JobFailed, PsgcError, UsageError
from psgc.launch.job.checks import check_job
from psgc.launch.job.planned import PLAN, inside_of, plan_here, plan_told
from psgc.launch.job.ranks import free_port
from psgc.launch.job.run import NOT_INHERITED
from psgc.launch.on_ray.placing import Found, lacking, seats
from psgc.processes.addresses import listening_socket
from psgc.variables import PREFIXES

T = TypeVar("T")
PLACED_S: Final = 60.0
OWN_END_S: Final = 6.0  # in which, after a failure, the others hear of it and end by themselves


class PlacementError(PsgcError):
    """The cluster has no room for the job."""


def launch(
    fn: Callable[..., T], *, workers: int, servers: int | None = None, resources: Mapping[str, float] | None = None,
    server_resources: Mapping[str, float] | None = None, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None, strategy: str = "PACK", placement_timeout_s: float = PLACED_S,
) -> list[T]:  # fmt: skip
    """Run ``fn(*args, **kwargs)``, which calls ``psgc.torch.init()``, in so many workers of one job; what it returned on each rank, in their order.

    servers: default: one for each node that workers are on. 0: the workers aggregate among themselves. resources: of each worker, as Ray
    names them (default: one CPU). server_resources: of each server (default: one CPU). env: settings of all processes (PSGC_CODEC and others); those that the
    driver's environment has under psgc's prefixes count, too. strategy: of the placement group; servers by default spread over nodes, unless it is strict.

    Raises what ``fn`` raised on the rank that failed first, as ``ray.get`` does, Ray's ActorDiedError for a worker that died, PsgcError for a scheduler or
    server that ended, PlacementError if the cluster has no room for ``placement_timeout_s``, UsageError.
    """
    ray = _ray()
    each, of_server = dict(resources or {"CPU": 1}), dict(server_resources or {"CPU": 1})
    if workers < 1 or (servers or 0) < 0:
        raise UsageError(f"psgc.ray.launch: workers={workers}, servers={servers}: at least 1 worker, and 0 servers or more")
    shared = _settings(env or {})
    _check(shared, workers, 1 if servers is None else servers)
    if not ray.is_initialized():
        ray.init()
    held = _Held(ray, strategy, placement_timeout_s)
    try:
        return _run(held, (each, workers), (of_server, servers), shared, (fn, tuple(args), dict(kwargs or {})))
    finally:
        held.end()


def _ray() -> Any:
    try:
        import ray
        import ray.util
    except ImportError:
        raise UsageError("psgc.ray needs Ray: pip install ray") from None
    return ray


def _settings(env: Mapping[str, str]) -> dict[str, str]:
    """What all processes of the job share."""
    inherited = {name: text for name, text in os.environ.items() if name.partition("_")[0] in PREFIXES and name not in NOT_INHERITED}
    own = {
        name: "" for name in (*NOT_INHERITED, "DMLC_NUM_WORKER", "PSGC_NODE_SIZES", "PSGC_LAUNCHER") if name.partition("_")[0] in PREFIXES
    }
    settings = {
        **inherited, **own, **env, "BYTEPS_FORCE_DISTRIBUTED": "1", "PSGC_JOB": str(secrets.randbits(62) | 1),
        "PSGC_TOKEN": env.get("PSGC_TOKEN", "") or inherited.get("PSGC_TOKEN", "") or secrets.token_hex(16),
    }  # fmt: skip
    if planned := plan_told(settings.get(PLAN, "")):
        settings[PLAN] = planned
    return settings | inside_of(plan_here(planned, needed=False), settings)


def _check(shared: Mapping[str, str], workers: int, servers: int) -> None:
    """Raise ConfigError before anything starts."""
    loss = shared.get("PSGC_ON_WORKER_LOSS", "").strip() or "stop"
    if loss != "stop":
        raise ConfigError(
            f"psgc.ray.launch: PSGC_ON_WORKER_LOSS={loss}: nobody starts another process in a dead worker's place there, so that its death ends the job; "
            f"leave it at stop"
        )
    numbers = {"DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers), "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "1"}
    config = Config.from_env({**shared, **numbers})
    check_job(config, workers=workers)
    if config.replicas:
        raise ConfigError(
            "psgc.ray.launch: PSGC_REPLICAS=1: no launcher keeps what servers have there, and an actor's end ends the job; leave it at 0"
        )


class _Held:
    """What a job has of the cluster: its placement groups and actors, until its end. limit_s: to wait for each group's place."""

    def __init__(self, ray: Any, strategy: str, limit_s: float) -> None:
        self.ray, self._strategy, self._limit_s = ray, strategy, limit_s
        self._groups, self._actors = list[Any](), list[Any]()

    def place(self, bundles: Sequence[Mapping[str, float]], what: str, *, spread: bool = False) -> Any:
        """A group of these bundles. what: they are, for an error. spread: over nodes, unless a strict strategy is asked for. Raises PlacementError."""
        strategy = "SPREAD" if spread and not self._strategy.startswith("STRICT") else self._strategy
        group = self.ray.util.placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
        self._groups.append(group)
        if not group.wait(self._limit_s):
            needed: Counter[str] = Counter()
            for bundle in bundles:
                needed.update(bundle)
            short = lacking(needed, self.ray.available_resources())
            why = f"it lacks {short}" if short else f"no placement of these bundles ({strategy}) fits its nodes"
            raise PlacementError(
                f"psgc.ray.launch: the cluster has no room for {what} within {self._limit_s:g} s (placement_timeout_s): {why}"
            )
        return group

    def start(self, kind: type, group: Any, bundle: int, resources: Mapping[str, float]) -> Any:
        """An actor in a bundle of the group."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        named = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
        options = {
            "num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": named,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        }  # fmt: skip
        if memory := resources.get("memory"):
            options["memory"] = memory
        self._actors.append(self.ray.remote(kind).options(**options).remote())
        return self._actors[-1]

    def end(self) -> None:
        for actor in self._actors:
            self.ray.kill(actor)
        for group in self._groups:
            self.ray.util.remove_placement_group(group)


def _run(
    held: _Held, of_workers: tuple[dict[str, float], int], of_servers: tuple[dict[str, float], int | None], shared: Mapping[str, str],
    call: tuple[Callable[..., T], tuple[Any, ...], dict[str, Any]],
) -> list[T]:  # fmt: skip
    """Start everything and see it to its end."""
    ray, (each, workers), (of_server, asked) = held.ray, of_workers, of_servers
    of_them = f"{workers} worker(s) of {each}"
    of_asked = "" if asked is None else f" and {asked} server(s){f' of {of_server}' if asked else ''}"
    group = held.place([each] * workers + [of_server] * (asked or 0), of_them + of_asked)
    members = [held.start(Worker, group, bundle, each) for bundle in range(workers)]
    found = [Found(*place) for place in ray.get([member.place.remote() for member in members])]
    servers = len({place.node for place in found}) if asked is None else asked
    if asked is None:
        apart = held.place([of_server] * servers, f"{servers} server(s) of {of_server} beside {of_them}", spread=True)
        bundles = [(apart, number) for number in range(servers)]
    else:
        bundles = [(group, workers + number) for number in range(servers)]
    seated = seats(found, {**shared, "DMLC_NUM_SERVER": str(servers)})
    first = found[seated[0].worker]
    scheduler = held.start(Service, group, seated[0].worker, {})
    root = {"DMLC_PS_ROOT_URI": first.host, "DMLC_PS_ROOT_PORT": str(ray.get(scheduler.listen.remote()))}
    meeting = {"MASTER_ADDR": first.host, "MASTER_PORT": str(ray.get(members[seated[0].worker].free_port.remote()))}
    services = {scheduler.serve.remote("scheduler", {**seated[0].env, **root, "DMLC_ROLE": "scheduler"}): "the scheduler"}
    for number, place in enumerate(bundles):
        server = held.start(Service, *place, of_server)
        own = {**seated[0].env, **root, "DMLC_ROLE": "server", "DMLC_SERVER_ID": str(number), "DMLC_WORKER_ID": ""}
        services[server.serve.remote("server", own)] = f"server {number}"
    runs = [members[seat.worker].run.remote({**seat.env, **root, **meeting}, *call) for seat in seated]
    return _await(ray, runs, services)


def _await(ray: Any, runs: Sequence[Any], services: Mapping[Any, str]) -> list[T]:
    """All ranks' results. Raises the first cause of a failure: see ``launch``."""
    pending, results = [*runs, *services], dict[Any, Any]()
    errors, ended = list[BaseException](), list[BaseException]()  # of ranks, and of services, which end because of ranks, too
    until = float("inf")
    while any(run in pending for run in runs) and time.monotonic() < until:
        done, pending = ray.wait(pending, num_returns=1, timeout=None if until == float("inf") else max(0.0, until - time.monotonic()))
        for ref in done:
            try:
                results[ref] = ray.get(ref)
                if ref in services and results[ref]:
                    ended.append(PsgcError(f"{services[ref]} ended with status {results[ref]}; its output says why"))
            except Exception as error:
                (errors if ref in runs else ended).append(error if ref in runs else PsgcError(f"{services[ref]} died: {_line(error)}"))
        if (errors or ended) and until == float("inf"):
            until = time.monotonic() + OWN_END_S
    if not all(run in results for run in runs):  # one that only tells of another is not the cause
        cause = next((error for error in errors if not isinstance(error, JobFailed)), [*errors, *ended][0])
        raise getattr(cause, "cause", cause) if isinstance(cause, JobFailed) else cause  # a line, without the rank's traceback
    return [results[run] for run in runs]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


class Worker:
    """The actor of one rank."""

    def place(self) -> tuple[str, str, tuple[str, ...]]:
        """See ``Found``."""
        ray = _ray()
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), tuple(map(str, gpus))

    def free_port(self) -> int:
        return free_port()

    def run(self, env: Mapping[str, str], fn: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
        """What ``fn`` returns, once this worker has left its job. What it raises is told to the other ranks first."""
        _set(env)
        from psgc.torch.session import api, ending

        try:
            returned = fn(*args, **kwargs)
            api.shutdown()
        except BaseException as error:
            ending.tell_ranks(error)
            raise
        return returned


class Service:
    """The actor of the scheduler or of a server."""

    def __init__(self) -> None:
        self._listening: Any = None

    def listen(self) -> int:
        """The port on which the scheduler will answer."""
        self._listening = listening_socket()
        return int(self._listening.getsockname()[1])

    def serve(self, role: str, env: Mapping[str, str]) -> int:
        """Serve until the job ends; the exit status."""
        from psgc.launch.job.role import run_role

        _set(env)
        if self._listening is None:
            return run_role(role)
        with self._listening:
            return run_role(role, {**os.environ, "PSGC_SCHEDULER_FD": str(self._listening.fileno())})


def _set(env: Mapping[str, str]) -> None:
    """Of this actor's process. "": unset."""
    for name, text in env.items():
        if text:
            os.environ[name] = text
        else:
            os.environ.pop(name, None)
