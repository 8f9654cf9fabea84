"""The paper's experiment (section 5): its protocol, and a command that needs torch and numpy alone.

    python3 -m autoopt_lab.paper --data DATA --out RUN --seeds 0:3 --minutes 9 --pack DIR

trains what RUN does not hold yet and ends cleanly; `autoopt paper` does the same where the laboratory is installed, and
makes the tables and figures.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from autoopt_lab import devices
from autoopt_lab.devices import DeviceError
from autoopt_lab.engine import RULES
from autoopt_lab.names import COUNTERPARTS
from autoopt_lab.pack import pack, unpack
from autoopt_lab.record import Conditions, Folder, Group, Job, Manifest, RecordError
from autoopt_lab.sweep import SAMPLES, Finished, SweepError, outstanding, sweep
from autoopt_lab.tasks.data import DataError

RATES = tuple(10 ** (half_decade / 2) for half_decade in range(-8, 1))  # L
MOMENTA = (0.0, 0.3, 0.8, 0.9, 0.95, 0.99)  # M
BATCHES = (8, 16, 32, 64, 128, 256)  # N
SEEDS = 10
TASKS = ("mnist", "cifar10")
PLAIN = ("sgd", "adam", "adagrad")

ERRORS = (RecordError, SweepError, DeviceError, DataError)  # what a user can mend; each is one sentence


def protocol(
    average: float | None = None, precision: str = Conditions.precision, compile_update: bool = False
) -> Manifest:
    """324 + 54 + 54 settings for each data set, and the automatic ones by both rules, with ten seeds each."""
    seeds = tuple(range(SEEDS))
    groups = []
    for task in TASKS:
        groups += [Group(task, auto, BATCHES, (automatic(auto),), seeds) for auto in COUNTERPARTS]
        groups += [Group(task, plain, BATCHES, grid(plain, RATES, MOMENTA), seeds) for plain in PLAIN]
    return Manifest("paper", Conditions(10, precision, compile_update, average), tuple(groups))


def small_protocol(average: float | None = None) -> Manifest:
    """For two CPU cores and a few minutes: part of MNIST, a 3 x 2 grid for SGD, the automatic ones by both rules."""
    seeds = (0, 1)
    groups = [Group("mnist", auto, (32,), (automatic(auto),), seeds) for auto in COUNTERPARTS]
    groups.append(Group("mnist", "sgd", (32,), grid("sgd", (0.01, 0.1, 1.0), (0.0, 0.9)), seeds))
    conditions = Conditions(5, average=average, train_samples=4000, test_samples=2000)
    return Manifest("paper, small version", conditions, tuple(groups))


def grid(optimizer: str, rates: Iterable[float], momenta: Iterable[float]) -> tuple[dict[str, float], ...]:
    """The paper searches the momentum of SGD alone."""
    if optimizer == "sgd":
        return tuple({"lr": rate, "momentum": momentum} for rate in rates for momentum in momenta)
    fixed = {"momentum": 0.9, "beta2": 0.99} if optimizer == "adam" else {}
    return tuple({"lr": rate, **fixed} for rate in rates)


def automatic(optimizer: str) -> dict[str, float]:
    """Algorithm 1 has a smoothing υ, which the paper does not state: it is written down with the result."""
    options = RULES[optimizer][0].options
    return {"smoothing": options["smoothing"]} if "smoothing" in options else {}


def seed_range(seeds: str) -> range:
    """FIRST:END, without END itself."""
    try:
        first, end = (int(bound) for bound in seeds.split(":"))
    except ValueError:
        first, end = 0, 0
    if not 0 <= first < end <= 2**31:
        raise SweepError(f"--seeds {seeds} is not of the form FIRST:END, such as 0:3 for the seeds 0, 1 and 2")
    return range(first, end)


def selection(seeds: str | None, only: Sequence[str]) -> Callable[[Job], bool]:
    """`seeds` is FIRST:END; `only` are TASK, TASK/OPTIMIZER or TASK/OPTIMIZER/BATCH, with * for any."""
    wanted = seed_range(seeds or "0:2147483648")
    patterns = [pattern + "/*" * (2 - pattern.count("/")) for pattern in only or ["*"]]

    def select(job: Job) -> bool:
        name = f"{job.task}/{job.optimizer}/{job.batch}"
        return job.seed in wanted and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return select


def chosen(manifest: Manifest, seeds: str | None, only: Sequence[str]) -> Callable[[Job], bool]:
    """As `selection`; SweepError if it selects nothing of the manifest."""
    select = selection(seeds, only)
    if not any(map(select, manifest.jobs())):
        names = ", ".join(dict.fromkeys(f"{group.task}/{group.optimizer}" for group in manifest.groups))
        asked = [f"--seeds {seeds}"] * bool(seeds) + [f"--only {pattern}" for pattern in only]
        raise SweepError(f"{' '.join(asked)} matches no run: there are {names}")
    return select


def line(finished: Finished, done: int, total: int, seconds: float) -> str:
    """One chunk, for people: what it was, how fast, and how much is left."""
    task, optimizer, batch, *_ = finished.jobs[0]
    seeds = sorted({job.seed for job in finished.jobs})
    what = f"{task} {optimizer} N={batch} seeds {seeds[0]}-{seeds[-1]}: {len(finished.jobs)} runs"
    if not finished.done:
        return f"{what} given up after {finished.seconds:.1f} s: they would not end in time"
    speed = f"{finished.seconds:.1f} s, {finished.samples / finished.seconds / 1e6:.3f} M samples/s"
    return f"{what}, {speed}; {done} of {total} runs, about {seconds / done * (total - done) / 60:.1f} min left"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("autoopt_lab.paper", description="Train what the paper's protocol asks for.")
    parser.add_argument("--out", type=Path, required=True, help="run folder; gone on with if it is there")
    parser.add_argument(
        "--data", type=Path, help="with MNIST/raw and cifar-10-batches-py; else AUTOOPT_DATA, else fetched"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, or a list: cuda:0,cuda:0 for two chunks at once")
    parser.add_argument("--on", default="here", help="here, or ray: train on the Ray cluster at --address")
    parser.add_argument(
        "--address", default="auto", help="of the Ray cluster, HOST:PORT; auto: the one of this machine"
    )
    parser.add_argument("--seeds", help="FIRST:END, only these now; all by default")
    parser.add_argument("--only", action="append", default=[], help="TASK[/OPTIMIZER[/BATCH]], * for any; repeatable")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing that would not end by then")
    parser.add_argument("--average", type=float, help="also the error of averaged weights; share of the newest: 0.003")
    parser.add_argument("--precision", default=Conditions.precision, help="of products on a GPU: tf32x3, tf32 or ieee")
    parser.add_argument("--compile-update", action="store_true", help="torch.compile the update: for small batches")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="in a step of all runs side by side on a GPU")
    parser.add_argument("--fast", action="store_true", help="the small version, for a CPU")
    parser.add_argument("--add", type=Path, action="append", default=[], help="first take in a packed file; repeatable")
    parser.add_argument("--pack", type=Path, help="at the end, pack all results into files of at most 15 MiB here")
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * given.minutes
    if given.fast:
        manifest = small_protocol(given.average)
    else:
        manifest = protocol(given.average, given.precision, given.compile_update)
    folder = Folder(given.out)
    try:
        for file in given.add:
            print(f"{file}: {unpack(file, folder)} runs", flush=True)
        _train(folder, manifest, given, deadline)
        if given.pack:
            print("packed:", *pack(folder, given.pack), flush=True)
    except ERRORS as error:
        print(f"autoopt_lab.paper: {error}.", file=sys.stderr)
        return 2
    return 0


def _train(folder: Folder, manifest: Manifest, given: argparse.Namespace, deadline: float) -> None:
    select, start = chosen(manifest, given.seeds, given.only), time.monotonic()
    with (
        devices.chosen(given.on, given.address, given.device) as pool,
        outstanding(folder, manifest, pool.device, select, print, given.samples) as todo,
    ):
        total, done, samples = sum(map(len, todo)), 0, 0
        print(f"{total} runs to do in {len(todo)} chunks on {pool.name}", flush=True)
        for finished in sweep(folder, todo, manifest.conditions, pool, given.data, deadline):
            done += len(finished.jobs) * finished.done
            samples += finished.samples * finished.done
            print(line(finished, done, total, time.monotonic() - start), flush=True)
    seconds = time.monotonic() - start
    print(f"{done} of {total} runs in {seconds:.1f} s, {samples / seconds / 1e6:.3f} M samples/s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
