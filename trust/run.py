"""All the long reliability runs, and one table of what came of them; `make trust`.

    python trust/run.py [PART ...] [--torch-suite PATH/TO/test_optim.py [--suite-note TEXT]] [--scale K]

Without a PART all run, on two processes. The row of each part that ran is kept in docs/results/trust.json, and the
table of all of them is printed and written to docs/trust.md. `--scale 50` is a rehearsal at a fiftieth of the size.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import autoopt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from trust.subjects import OPTIMIZERS, SUBJECTS

ROOT = Path(__file__).parents[1]
CORES = 2
RESULTS = ROOT / "docs" / "results" / "trust.json"
NOT_COVERED = (
    "All of this ran on the CPU: no case moves a model between devices.",
    "What the support matrix lists as not noticed is no case: samples one by one in one backward pass, say.",
    "PyTorch's suite passes bare tensors, so it runs the rules without per-sample statistics.",
)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    part: str
    cases: int
    failures: int
    figures: str = ""  # what else was measured
    errors: tuple[str, ...] = ()
    made: str = ""  # by which version, when, in how many minutes


@dataclass(frozen=True)
class Part:
    """A part of the table: what to run for each of its shards, and how to put their rows together."""

    title: str
    shards: list[tuple[object, ...]]
    run: Callable[..., Row]
    total: Callable[[list[Row]], str] = lambda rows: ""
    parallel: bool = True  # whether two shards may run side by side


# -- the parts, each for one shard ---------------------------------------------------------------------------------


def faults(subject: str) -> Row:
    from trust import test_faults  # enters the cases
    from trust.faults import FAULTS, Refused

    errors = []
    for name, fault in FAULTS.items():
        try:
            fault.check(SUBJECTS[subject])
        except Exception as error:
            errors.append(f"{name}, {subject}: {type(error).__name__}: {first_line(error)}")
    assert test_faults
    refused = sum(isinstance(fault, Refused) for fault in FAULTS.values())
    figures = f"{len(FAULTS)} faults for each of {len(SUBJECTS)}: {len(FAULTS) - refused} survived, {refused} refused"
    return Row("", len(FAULTS), len(errors), figures, tuple(errors))


def nonfinite(subject: str, steps: int) -> Row:
    from trust.nonfinite import trials

    return attempt(subject, steps, lambda: trials(SUBJECTS[subject], steps, seed=11))


def resume(subject: str, kills: int) -> Row:
    from trust.resume import MODES

    runs = [f"{subject}:{mode}" for mode in MODES]
    done = subprocess.run(
        [sys.executable, "-m", "trust.resume", str(kills), "5", *runs],
        capture_output=True, text=True, cwd=ROOT / "tests",
    )  # fmt: skip
    error = (f"{subject}: {done.stderr.strip().splitlines()[-1]}",) if done.returncode else ()
    return Row("", kills * len(runs), len(error), errors=error)


def fuzz(shard: int, examples: int) -> Row:
    from hypothesis import HealthCheck, given, seed, settings

    from trust.fuzz import check
    from trust.plans import plans

    limits = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    return attempt(f"shard {shard}", examples, limits(seed(shard)(given(plans())(check))))


def soak(number: int, steps: int) -> Row:
    from trust.soak import soak as measure

    kind = OPTIMIZERS[number]
    measure(kind, 300)  # what the process itself loads at first
    found = measure(kind, steps)
    grown = found.tensors or found.objects > 50 or found.slope * steps > 2**21
    errors = (f"{kind.__name__}: {found}",) if grown else ()
    return Row("", steps, len(errors), f"{found.tensors} {found.slope:.3f}", errors)


def lab(settings: int) -> Row:
    from lab_load import load

    found = load(settings)
    figures = (
        f"{found.slope:+.0f} bytes per setting; {found.full_disks} full disks, {found.killed_workers} killed workers: "
        f"{found.lost} lost, {found.different} different"
    )
    return Row("", found.settings + found.disturbed, found.lost + found.different, figures)


def torch_suite(path: str, note: str) -> Row:
    """`note` says which file it is: it may be that of another release, or a part of it."""
    from torch_suite import run

    outcome = run(Path(path))
    passed = sum(outcome.passed.values())
    errors = tuple(f"{name}: {error}" for name, error in outcome.failed.items())
    why = "".join(f"\n    - `{name}`: {reason}" for name, reason in outcome.not_applicable.items())
    return Row(
        "", passed + len(errors), len(errors), f"{note}; {len(outcome.not_applicable)} not applicable:{why}", errors
    )


def attempt(name: str, cases: int, work: Callable[[], object]) -> Row:
    try:
        work()
    except Exception as error:
        return Row("", cases, 1, errors=(f"{name}: {type(error).__name__}: {first_line(error)}",))
    return Row("", cases, 0)


def first_line(error: Exception) -> str:
    """And what hypothesis found to be the smallest example, if it did."""
    example = " ".join(" ".join(getattr(error, "__notes__", [])[:1]).split())
    return f"{str(error).partition(chr(10))[0][:200]} {example[:800]}".rstrip()


# -- the table -----------------------------------------------------------------------------------------------------


def slopes(rows: list[Row]) -> str:
    tensors, bytes_ = zip(*((int(t), float(b)) for t, b in (row.figures.split() for row in rows)), strict=True)
    return f"live tensors {max(tensors):+d}; memory {min(bytes_):+.2f} to {max(bytes_):+.2f} bytes per step"


def parts(scale: int, suite: str | None, note: str) -> dict[str, Part]:
    """All parts at a scale-th of their size."""
    subjects = list(SUBJECTS)
    kills = max(1, 50 // scale)
    found = {
        "faults": Part(
            "Fault matrix: survives with the right weights, or is refused by name",
            [(s,) for s in subjects], faults, lambda rows: rows[0].figures,
        ),
        "nonfinite": Part(
            "A batch that is not finite, at random steps: the run equals the one without it",
            [(s, 1000 // scale) for s in subjects], nonfinite, bits,
        ),
        "resume": Part(
            "SIGKILL at random steps and resumed, in float32, bfloat16, AMP and with accumulation",
            [(s, kills) for s in subjects], resume, bits,
        ),
        "fuzz": Part(
            "Random models, loops and options: named errors alone, statistics equal to the reference",
            [(shard, 10_000 // scale // 10) for shard in range(10)], fuzz,
        ),
        "soak": Part(
            f"Long runs with evaluation in between, {100_000 // scale:,} steps of each optimizer",
            [(number, 100_000 // scale) for number in range(len(OPTIMIZERS))], soak, slopes,
        ),
        "lab": Part(
            "The laboratory: tiny settings on two cores, then a full disk and killed workers",
            [(10_000 // scale,)], lab, lambda rows: rows[0].figures, parallel=False,
        ),
    }  # fmt: skip
    if suite:
        title = "PyTorch's own optimizer suite, TestOptimRenewed"
        found["torch-suite"] = Part(title, [(suite, note)], torch_suite, lambda rows: rows[0].figures)
    return found


def bits(rows: list[Row]) -> str:
    return "bit for bit" if not any(row.failures for row in rows) else "NOT bit for bit"


def table(rows: list[Row]) -> Iterator[str]:
    yield "| what | cases | failures | |"
    yield "|---|---|---|---|"
    lists = []
    for row in rows:
        figures, _, items = row.figures.partition("\n")
        yield f"| {row.part} | {row.cases:,} | {row.failures} | {figures.rstrip(':')} |"
        lists += [f"\n{row.part}, not applicable:\n", *(line.strip() for line in items.splitlines())] if items else []
    yield from lists


def document(rows: list[Row]) -> str:
    lines = [
        "# Trust: what was done to it, and what came of it",
        "",
        "Printed by `make trust` (`trust/run.py`, an estimated 40 minutes on two quiet cores); every optimizer under "
        f"each rule: {len(SUBJECTS)} subjects. The short versions of all parts run with every commit (`tests/trust/`).",
        "",
        *table(rows),
        "",
        "Made by:",
        "",
        *(f"- {row.part.partition(':')[0]}: {row.made}" for row in rows),
    ]
    lines += ["", "## Not covered", "", *(f"- {sentence}" for sentence in NOT_COVERED)]
    errors = [error for row in rows for error in row.errors]
    if errors:
        lines += ["", "## Failures", "", *(f"- {error}" for error in errors)]
    return "\n".join(lines) + "\n"


def measured(name: str, part: Part, scale: int) -> Row:
    """Run a part, and say how it goes."""
    start = time.monotonic()
    workers = CORES if part.parallel else 1
    if len(part.shards) == 1:
        rows = [part.run(*part.shards[0])]
    else:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            rows = list(pool.map(part.run, *zip(*part.shards, strict=True)))
    errors = tuple(error for row in rows for error in row.errors)
    minutes = (time.monotonic() - start) / 60
    day = datetime.datetime.now(datetime.UTC).date()
    made = (
        f"AutoOpt {autoopt.__version__}, torch {torch.__version__}, {platform.machine()}, {day}, {minutes:.1f} minutes"
    )
    made += f", at 1/{scale} of the full size" if scale > 1 else ""
    cases, failures = sum(row.cases for row in rows), sum(row.failures for row in rows)
    row = Row(part.title, cases, failures, part.total(rows), errors, made)
    print(f"{name}: {row.cases:,} cases, {row.failures} failures, {minutes:.1f} minutes. {row.figures}", flush=True)
    for error in errors:
        print(f"    {error}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*")
    parser.add_argument("--torch-suite", metavar="PATH")
    parser.add_argument("--suite-note", default="the file as it was given", metavar="TEXT")
    parser.add_argument("--scale", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = parts(options.scale, options.torch_suite, options.suite_note)
    if unknown := sorted(set(options.part) - set(known)):
        parser.error(f"there is no part {unknown[0]!r}: choose from {', '.join(known)}")
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.part or known:
        kept[name] = asdict(measured(name, known[name], options.scale))
        RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    order = dict.fromkeys([*known, *kept])
    rows = [Row(**kept[name]) for name in order if name in kept]
    text = document(rows)
    (ROOT / "docs" / "trust.md").write_text(text)
    print(text)
    return 1 if any(row.failures for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
