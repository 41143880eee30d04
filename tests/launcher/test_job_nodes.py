"""Several nodes under Slurm, with stand-ins for srun and scontrol that record how they were called."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import job
import pytest
from job_nodes import Joined, NodesOfJob, ask, check_port, own_address, requeue, slurm_nodes

from verl.config import load_config
from verl.errors import ConfigError, ResourceError

STAND_IN = f"""#!{sys.executable}
import json, os, sys, time
name = os.path.basename(sys.argv[0])
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
if name == "scontrol" and sys.argv[1] == "show":
    print("\\n".join(os.environ["NODES"].split(",")))
if name == "srun":
    if os.environ.get("BROKEN", "nothing") in " ".join(sys.argv):
        print("no such device")
        sys.exit(7)
    time.sleep(120)
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], dict[str, str]]:
    """Return a function: number of nodes -> the environment of such a job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "scontrol"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def environment(count: int) -> dict[str, str]:
        mine = {
            "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": str(count), "SLURM_JOB_NODELIST": f"n[1-{count}]",
            "SLURM_CPUS_PER_TASK": "16", "NODES": ",".join(f"n{i + 1}" for i in range(count)),
            "RECORD": str(tmp_path / "record"),
        }  # fmt: skip
        for name, value in mine.items():
            monkeypatch.setenv(name, value)
        return dict(os.environ)

    return environment


def recorded(tmp_path: Path, count: int) -> list[list[str]]:
    """Wait for ``count`` calls (stand-ins are processes) and return them."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        lines = (tmp_path / "record").read_text().splitlines() if (tmp_path / "record").exists() else []
        if len(lines) >= count:
            break
        time.sleep(0.05)
    return [json.loads(line) for line in lines]


def config(nodes: int, *more: str):  # type: ignore[no-untyped-def]
    return load_config("tiny_ppo", [f"trainer.nnodes={nodes}", "cluster.port=46379", *more])


def everybody(tmp_path: Path, devices: int = 0) -> Callable[[str, Mapping[str, str]], list[Joined]]:
    """A probe that sees a node once its srun was called: one node more at every question."""
    seen: list[Joined] = []

    def probe(address: str, env: Mapping[str, str]) -> list[Joined]:
        calls = [call for call in recorded(tmp_path, 1) if call[0] == "srun"]
        if len(seen) < len(calls):
            seen.append(Joined(f"n{len(seen) + 1}.cluster", "10.0.0.1", 16, devices))
        return list(seen)

    return probe


def srun(name: str, *ray: str) -> list[str]:
    return [
        "srun", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--overlap", "--cpus-per-task=16",
        sys.executable, "-m", "ray.scripts.scripts", "start", *ray, "--num-cpus=16", "--block",
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_exact_commands(count: int, slurm: Callable[[int], dict[str, str]], tmp_path: Path) -> None:
    env = slurm(count)
    names = slurm_nodes(config(count), env)
    if count == 1:
        assert names == [] and not (tmp_path / "record").exists()  # the trainer starts a private Ray
        return
    nodes = NodesOfJob(names, config(count), tmp_path / "logs", env, "127.0.0.1")
    try:
        nodes.start(everybody(tmp_path))
        head = ("--head", "--node-ip-address=127.0.0.1", "--port=46379", "--include-dashboard=false")
        calls = recorded(tmp_path, 1 + count)
        assert calls[:2] == [["scontrol", "show", "hostnames", f"n[1-{count}]"], srun("n1", *head)]
        joins = [srun(f"n{i}", "--address=127.0.0.1:46379") for i in range(2, count + 1)]
        assert sorted(calls[2:]) == joins  # they start at the same time
        assert nodes.ray_address == "127.0.0.1:46379" and nodes.death() is None
        steps = list(nodes._steps.values())
    finally:
        nodes.stop()
    assert len(steps) == count and all(step.poll() is not None for step in steps)


PASS_ON = f"""#!{sys.executable}
import os, sys
options = [place for place, word in enumerate(sys.argv) if place and not word.startswith("--")]
os.execv(sys.argv[options[0]], sys.argv[options[0]:])
"""


def test_ray_itself_is_started_joined_and_ended(slurm: Callable[[int], dict[str, str]], tmp_path: Path) -> None:
    """Two of Ray's nodes on this machine, with its own authentication."""
    env = slurm(2) | {"SLURM_CPUS_PER_TASK": "1"}
    (tmp_path / "bin" / "srun").write_text(PASS_ON)
    interface = next((name for _, name in socket.if_nameindex() if name.startswith(("e", "w"))), None)
    if interface is None:
        pytest.skip("this machine has no network interface beside loopback: Ray's head needs an address")
    with socket.socket() as probe:
        probe.bind((own_address(interface), 0))
        port = probe.getsockname()[1]
    settings = config(2, f"cluster.port={port}", f"cluster.interface={interface}", "cluster.join_timeout_s=90")
    address = own_address(interface)
    env["PYTHONPATH"] = job.environment()["PYTHONPATH"]
    nodes = NodesOfJob(["n1", "n2"], settings, tmp_path / "logs", env, address)
    try:
        nodes.start()
        found = ask(nodes.ray_address, nodes.env)
        assert [node.cores for node in found] == [1, 1] and {node.address for node in found} == {address}
        with pytest.raises(ConnectionError):  # somebody who has not this job's token
            ask(nodes.ray_address, nodes.env | {"RAY_AUTH_TOKEN": "0" * 64})
        steps = list(nodes._steps.values())
    finally:
        nodes.stop()
    assert len(steps) == 2 and all(step.poll() is not None for step in steps)
    check_port(address, port)  # nobody listens any more


def test_a_node_that_never_joins_is_named(slurm: Callable[[int], dict[str, str]], tmp_path: Path) -> None:
    nodes = NodesOfJob(["n1", "n2"], config(2, "cluster.join_timeout_s=2"), tmp_path, slurm(2), "127.0.0.1")
    try:
        with pytest.raises(ResourceError, match=r"node n2 did not join Ray at 127\.0\.0\.1:46379 within .* = 2 s"):
            nodes.start(lambda address, env: [Joined("n1.cluster", address, 16, 0)])
    finally:
        nodes.stop()


def test_a_node_whose_ray_ends_is_named_with_its_words(
    slurm: Callable[[int], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN", "--nodelist=n2")
    nodes = NodesOfJob(["n1", "n2"], config(2), tmp_path, slurm(2), "127.0.0.1")
    try:
        with pytest.raises(ResourceError, match=r"Ray on node n2 ended with status 7:\nno such device"):
            nodes.start(lambda address, env: [Joined("n1", address, 16, 0)])
    finally:
        nodes.stop()


def test_too_few_devices_are_refused(slurm: Callable[[int], dict[str, str]], tmp_path: Path) -> None:
    env = slurm(2)
    nodes = NodesOfJob(["n1", "n2"], config(2, "trainer.n_gpus_per_node=4"), tmp_path, env, "127.0.0.1")
    try:
        with pytest.raises(ResourceError, match=r"n1\.cluster \(10\.0\.0\.1\) has 2.*--gpus-per-node=4"):
            nodes.start(everybody(tmp_path, devices=2))
    finally:
        nodes.stop()
    with pytest.raises(ConfigError, match="the job has 2 devices per node"):
        slurm_nodes(config(2, "trainer.n_gpus_per_node=4"), env | {"SLURM_GPUS_ON_NODE": "2"})


def test_nodes_and_the_key_must_agree(slurm: Callable[[int], dict[str, str]]) -> None:
    env = slurm(4)
    with pytest.raises(ConfigError, match=r"trainer\.nnodes = 1, but the job has 4 nodes: sbatch --nodes=1"):
        slurm_nodes(config(1), env)
    with pytest.raises(ConfigError, match="but this is one machine"):
        slurm_nodes(config(2), {})
    assert slurm_nodes(config(2), {"RAY_ADDRESS": "10.0.0.1:6379"}) == []


def test_addresses_of_the_wrong_interface() -> None:
    with pytest.raises(ResourceError, match=r"127\.0\.0\.1 of .* means another machine.*cluster\.interface"):
        own_address("lo")
    with pytest.raises(ConfigError, match=r"cluster\.interface = ib77: .* has .*lo"):
        own_address("ib77")


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"cluster\.port = {port}: 127\.0\.0\.1:{port} cannot be used"):
            check_port("127.0.0.1", port)


def test_a_service_on_loopback_is_no_use_to_other_nodes(
    slurm: Callable[[int], dict[str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(2)
    monkeypatch.setattr(job, "own_address", lambda interface: "10.0.0.1")
    status = job.main(["train", "trainer.nnodes=2", "retriever.url=http://127.0.0.1:8002/retrieve"])
    assert status == 2 and "means another machine on each of the 2 nodes" in capsys.readouterr().err


def test_requeue(slurm: Callable[[int], dict[str, str]], tmp_path: Path) -> None:
    assert not requeue({})
    assert requeue(slurm(1)) and recorded(tmp_path, 1) == [["scontrol", "requeue", "17"]]
