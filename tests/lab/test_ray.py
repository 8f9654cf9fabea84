"""What `--on ray` promises: the table of a sweep on one machine, though a machine of the cluster is lost on the way."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sweep_tools
from sweep_tools import TASK, manifest
from test_sweep import assert_same
from test_sweep_report import autoopt

from autoopt_lab.devices import DeviceError, chosen
from autoopt_lab.record import Conditions, Folder, Group, Manifest
from autoopt_lab.results import load
from autoopt_lab.sweep import Finished, SweepError, outstanding, sweep

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed; run: pip install 'autoopt[ray]'"
)
# Ray warns of changes in its own future versions, and leaves sockets and files open when it ends.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.xdist_group("ray"),
]

# The tiny task, but its first chunk in every process waits until it is told to go on, and says on which machine it is.
WAITING_TASK = """
import sys
import time
from pathlib import Path
from tiny_task import NET
import tiny_task

def data(folder=None):
    marks = Path(__file__).parent
    ray = sys.modules.get("ray")
    node = ray.get_runtime_context().get_node_id() if ray and ray.is_initialized() else ""
    (marks / f"began-{node}").touch()
    while node and not (marks / "go").exists():
        time.sleep(0.05)
    return tiny_task.data()
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two machines with a core each, in processes of this one."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where the waiting task finds the tiny one
    from ray.cluster_utils import Cluster

    machine = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    both = Cluster(initialize_head=True, head_node_args={**machine, "include_dashboard": False})
    both.add_node(**machine)
    both.wait_for_nodes()
    yield both
    both.shutdown()


def run(path: Path, wanted: Manifest, address: str) -> list[Finished]:
    folder = Folder(path)
    with chosen("ray", address, "auto") as pool, outstanding(folder, wanted, pool.device) as todo:
        return list(sweep(folder, todo, wanted.conditions, pool))


@needs_ray
def test_a_machine_lost_on_the_way_costs_its_chunk_alone(cluster: Any, tmp_path: Path) -> None:
    task = tmp_path / "waiting_task.py"
    task.write_text(WAITING_TASK)
    wanted = replace(manifest(4), groups=tuple(replace(group, task=str(task)) for group in manifest(4).groups))
    (second,) = cluster.worker_nodes
    began = {node: tmp_path / f"began-{node.node_id}" for node in (cluster.head_node, second)}
    lost = threading.Event()

    def lose() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and not all(mark.exists() for mark in began.values()):
            time.sleep(0.05)
        if all(mark.exists() for mark in began.values()):  # both machines are at a chunk
            cluster.remove_node(second, allow_graceful=False)
            lost.set()
        (tmp_path / "go").touch()

    killer = threading.Thread(target=lose)
    killer.start()
    done = run(tmp_path / "run", wanted, cluster.address)
    killer.join()
    assert lost.is_set()
    assert sorted(job for chunk in done for job in chunk.jobs) == sorted(wanted.jobs())  # none lost, none twice
    parts, damaged = Folder(tmp_path / "run").parts()
    assert (len(parts), damaged) == (len(done), {})
    sweep_tools.run(tmp_path / "alone", wanted)
    assert_same(load(tmp_path / "run")[0], load(tmp_path / "alone")[0])
    assert run(tmp_path / "run", wanted, cluster.address) == []


@needs_ray
def test_the_command_line_trains_on_a_cluster_and_says_what_is_wrong_there(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on = ["--on", "ray", "--address", cluster.address]
    common = ["sweep", "--task", TASK, "--optimizer", "sgd", "--lr", "0.1", "--epochs", 1, "--out", tmp_path / "run"]
    assert autoopt(monkeypatch, *common, "--batch", 8, *on) == 0
    assert "Results: " in capsys.readouterr().out
    found = load(tmp_path / "run")[0]
    assert len(found.jobs) == 3
    assert found.made[0]["command"].startswith("autoopt sweep --task")  # though it ran elsewhere
    assert autoopt(monkeypatch, *common, "--batch", 64, *on) == 2
    error = capsys.readouterr().err
    assert error.startswith("autoopt: a batch of 64 does not fit the 32 training samples")
    assert error.count("\n") == 1
    assert autoopt(monkeypatch, *common, *on, "--device", "cuda") == 2
    assert "has no GPU: choose --device cpu" in capsys.readouterr().err
    assert autoopt(monkeypatch, *common, *on, "--minutes", 0) == 0
    assert "Time is up" in capsys.readouterr().out


@needs_ray
def test_an_error_on_another_machine_is_that_error(cluster: Any, tmp_path: Path) -> None:
    bad = Manifest("bad", Conditions(epochs=1), (Group("minst", "sgd", (4,), ({},), (0,)),))
    with pytest.raises(SweepError, match=r"^there is no task 'minst'") as caught:
        run(tmp_path, bad, cluster.address)
    assert "\n" not in str(caught.value)


@needs_ray
@pytest.mark.parametrize("address", ["auto", "127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:port"])
def test_a_cluster_that_is_not_there_is_one_sentence(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # "auto" shall not find a cluster of somebody else
    with pytest.raises(
        DeviceError, match=rf"no Ray cluster answers at {address} \(.*\): start one with: ray start"
    ) as e:
        run(tmp_path, manifest(1), address)
    assert "\n" not in str(e.value)


@needs_ray
def test_with_ray_a_device_is_a_kind() -> None:
    with pytest.raises(DeviceError, match="--device cuda:1 does not name a kind"), chosen("ray", "auto", "cuda:1"):
        pass


@pytest.mark.parametrize(
    ("on", "says"),
    [("ray", "--on ray needs ray, which is not installed: run: pip install 'autoopt[ray]'"), ("moon", "--on moon is")],
)
def test_what_cannot_be_used_is_one_sentence_and_exit_code_2(
    on: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    sweep = ["sweep", "--task", TASK, "--optimizer", "auto-sgd", "--out", tmp_path / "run", "--on", on]
    assert autoopt(monkeypatch, *sweep) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
