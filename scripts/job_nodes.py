"""Ray over all nodes of a Slurm job: started with srun, waited for, stopped whatever happens.

The job's script runs on the first node; there the head is started, and one further srun per node joins it, so that a
node that fails has a name and a log of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from job_service import child

from verl.config import RunConfig
from verl.errors import ConfigError, ResourceError

_SIOCGIFADDR = 0x8915
_STOP_S = 20.0


@dataclass(frozen=True)
class Joined:
    """A node that Ray knows."""

    name: str
    address: str
    cores: int
    devices: int


Probe = Callable[[str, Mapping[str, str]], list[Joined]]
"""(address of the head, environment) -> nodes that have joined; ConnectionError while the head does not answer."""


def slurm_nodes(config: RunConfig, environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of this Slurm job over which Ray has to be started: none where one machine is enough.

    Raises ConfigError when ``trainer.nnodes`` is not what the job has.
    """
    wanted = config.trainer.nnodes
    given = int(environ.get("SLURM_JOB_NUM_NODES", "1"))
    if "RAY_ADDRESS" in environ:
        return []  # the cluster is somebody else's: ``ray job submit``, or started by hand
    if wanted != given and "SLURM_JOB_ID" in environ:
        raise ConfigError(
            f"trainer.nnodes = {wanted}, but the job has {given} nodes: sbatch --nodes={wanted}, or "
            f"trainer.nnodes={given}"
        )
    if wanted > given:
        raise ConfigError(
            f"trainer.nnodes = {wanted}, but this is one machine: use sbatch --nodes={wanted}, or name a Ray cluster "
            "by RAY_ADDRESS"
        )
    per_node = environ.get("SLURM_GPUS_ON_NODE", "")
    if per_node.isdigit() and int(per_node) < config.trainer.n_gpus_per_node:
        raise ConfigError(
            f"trainer.n_gpus_per_node = {config.trainer.n_gpus_per_node}, but the job has {per_node} devices per node: "
            f"sbatch --gpus-per-node={config.trainer.n_gpus_per_node}, or lower the key"
        )
    if given == 1:
        return []
    command = ["scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environ), check=False)
    names = done.stdout.split()
    if done.returncode != 0 or len(names) != given:
        raise ResourceError(f"{' '.join(command)} named {names} for {given} nodes: {done.stderr.strip()}")
    return names


def own_address(interface: str | None) -> str:
    """Return this machine's address for the other nodes. Raises ConfigError, ResourceError."""
    if interface is None:
        try:
            address = socket.gethostbyname(socket.gethostname())
        except OSError as error:
            raise ResourceError(f"{socket.gethostname()} has no address ({error}); set cluster.interface") from error
    else:
        known = [name for _, name in socket.if_nameindex()]
        if interface not in known:
            raise ConfigError(f"cluster.interface = {interface}: {socket.gethostname()} has {', '.join(known)}")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
            except OSError as error:
                raise ConfigError(f"cluster.interface = {interface}: it has no IPv4 address ({error})") from error
        address = socket.inet_ntoa(packed[20:24])
    if address.startswith("127."):
        raise ResourceError(
            f"{address} of {socket.gethostname()} means another machine on every node: set cluster.interface to one "
            f"that the nodes share, of {', '.join(name for _, name in socket.if_nameindex())}"
        )
    return address


def check_port(address: str, port: int) -> None:
    """Raise ResourceError when something listens where the head of Ray should."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise ResourceError(
                f"cluster.port = {port}: {address}:{port} cannot be used ({error}); another job's Ray may run here: "
                "set another port"
            ) from error


class NodesOfJob:
    """Ray on ``names``, the first of which is this machine."""

    def __init__(
        self, names: Sequence[str], config: RunConfig, logs: Path, env: Mapping[str, str], address: str
    ) -> None:
        self.names, self.config, self.logs, self.address = list(names), config, logs, address
        self.env = dict(env)
        if "RAY_AUTH_MODE" not in env:
            # ``ray start`` asks whoever connects for a token, but only reads one of the home folder: one for this job.
            self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        if config.cluster.interface is not None:
            # What the workers' process groups listen on; Ray's daemons hand it down to them.
            self.env |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), config.cluster.interface)
        self._steps: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def ray_address(self) -> str:
        """Where the head listens: the trainer's RAY_ADDRESS."""
        return f"{self.address}:{self.config.cluster.port}"

    def start(self, probe: Probe | None = None) -> None:
        """Start the head and every other node; wait until all have joined. Raises ResourceError."""
        check_port(self.address, self.config.cluster.port)
        self.logs.mkdir(parents=True, exist_ok=True)
        head, *others = self.names
        port = f"--port={self.config.cluster.port}"
        self._step(head, ["--head", f"--node-ip-address={self.address}", port, "--include-dashboard=false"])
        self._wait([head], probe or ask)
        for name in others:
            self._step(name, [f"--address={self.ray_address}"])
        self._check(self._wait(self.names, probe or ask))

    def stop(self) -> None:
        """End the steps, and with them every process of Ray on their nodes."""
        steps, self._steps = list(self._steps.values())[::-1], {}
        for step in steps:
            if step.poll() is None:
                step.terminate()
        for step in steps:
            try:
                step.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                step.kill()
                step.wait()

    def death(self) -> str | None:
        """Return which node's Ray has ended, and the end of its log; None while all run."""
        for name, step in self._steps.items():
            if step.poll() is not None:
                lines = self._log(name).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
                return "\n".join([f"Ray on node {name} ended with status {step.returncode}:", *lines])
        return None

    def _log(self, name: str) -> Path:
        return self.logs / f"ray-{name}.log"

    def _step(self, name: str, arguments: Sequence[str]) -> None:
        """Run ``ray start`` on one node until it is told to end. The step shares the node with the job's script."""
        cores = self.env.get("SLURM_CPUS_PER_TASK")
        options = [f"--cpus-per-task={cores}"] if cores else []
        ray = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *arguments,
            *([f"--num-cpus={cores}"] if cores else []),
        ]
        command = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--overlap", *options, *ray, "--block"]
        with self._log(name).open("wb") as log:
            self._steps[name] = child(
                command, env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _wait(self, names: Sequence[str], probe: Probe) -> list[Joined]:
        """Return the nodes once as many as ``names`` have joined; ResourceError names the rest at the deadline."""
        limit = self.config.cluster.join_timeout_s
        deadline, found, trouble = time.monotonic() + limit, list[Joined](), ""
        while time.monotonic() < deadline:
            if (reason := self.death()) is not None:
                raise ResourceError(f"{reason}\nmend that and submit the job again")
            try:
                found = probe(self.ray_address, self.env)
            except ConnectionError as error:
                trouble = f" The head does not answer: {error}."
            else:
                trouble = ""
                if len(found) >= len(names):
                    return found
            time.sleep(1.0)
        present = {_short(node.name) for node in found}
        missing = [name for name in names if _short(name) not in present]
        raise ResourceError(
            f"node {', '.join(missing)} did not join Ray at {self.ray_address} within cluster.join_timeout_s = "
            f"{limit:g} s (joined: {', '.join(sorted(present)) or 'none'}).{trouble} Can it reach {self.address}? "
            f"If that is the address of the wrong interface, set cluster.interface; logs: {self.logs}/ray-*.log"
        )

    def _check(self, nodes: Sequence[Joined]) -> None:
        """Refuse nodes that cannot hold their ranks, before any model is loaded."""
        wanted = self.config.trainer.n_gpus_per_node
        accelerated = any(node.devices for node in nodes)
        poor = [node for node in nodes if accelerated and node.devices < wanted]
        if poor:
            told = ", ".join(f"{node.name} ({node.address}) has {node.devices}" for node in poor)
            raise ResourceError(
                f"trainer.n_gpus_per_node = {wanted} devices, but {told}: sbatch --gpus-per-node={wanted}, or lower "
                "the key"
            )


def _short(name: str) -> str:
    return name.partition(".")[0]


def ask(address: str, env: Mapping[str, str]) -> list[Joined]:
    """Ask the cluster who has joined; raises ConnectionError with the last words of an attempt to connect."""
    command = [sys.executable, "-m", "verl.cluster.nodes", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=dict(env), check=False, timeout=60)
    except subprocess.TimeoutExpired:
        raise ConnectionError(f"no answer from {address} within 60 s") from None
    if done.returncode != 0:
        raise ConnectionError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    return [Joined(*row) for row in json.loads(done.stdout.strip().splitlines()[-1])]


def requeue(environ: Mapping[str, str]) -> bool:
    """Put this Slurm job back into the queue, where it goes on from its checkpoint; False outside of Slurm."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return False
    return (
        subprocess.run(["scontrol", "requeue", job], env=dict(os.environ | dict(environ)), check=False).returncode == 0
    )
