"""All results of a run folder as one table, and that table as Parquet, in which results are kept and shared."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autoopt_lab.record import FORMAT, IDENTITY, MEASURED, Columns, Folder, Job, Manifest, Part, RecordError, jobs_of

KINDS = ("rate", "momentum", "noise")  # of the engine's trace, in its order


class Trace(NamedTuple):
    """What an automatic rule chose for every tensor, at some steps."""

    step: np.ndarray  # (P,)
    tensor: list[str]  # (L,)
    value: np.ndarray  # (P, 3, L), by KINDS


@dataclass(frozen=True)
class Results:
    """A row per run, each once, in the order of the jobs."""

    manifest: Manifest
    made: list[Mapping[str, Any]]  # every different when, where and by what
    columns: Columns
    traces: dict[Job, Trace]

    @cached_property
    def jobs(self) -> list[Job]:
        return jobs_of(self.columns)


def load(path: Path) -> tuple[Results, list[str]]:
    """From the folder's parts, or where there are none from its Parquet; and a sentence on each part left out."""
    folder = Folder(path)
    parts, damaged = folder.parts()
    if parts:
        return joined(folder.manifest(), parts), list(damaged.values())
    if (path / "results.parquet").exists():
        return _read(path), list(damaged.values())
    raise RecordError(f"{path} holds no results: run train, sweep or paper first, or choose another folder")


def joined(manifest: Manifest, parts: list[Part]) -> Results:
    where = {job: (p, k) for p, part in enumerate(parts) for k, job in enumerate(part.jobs())}
    order = [where[job] for job in sorted(where)]
    options = {name for part in parts for name in part.columns} - {*IDENTITY, *MEASURED}

    def column(name: str) -> np.ndarray:
        missing = np.array(np.nan)
        return np.array([parts[p].columns[name][k] if name in parts[p].columns else missing for p, k in order])

    traces = {
        job: Trace(part.trace["step"], part.trace["tensor"].tolist(), part.trace["value"][k])
        for job, (p, k) in where.items()
        if (part := parts[p]).trace
    }
    names = (*IDENTITY, *sorted(options), *MEASURED)
    made = {json.dumps(dict(part.made) | {"time": None, "seconds": None}): part.made for part in parts}
    return Results(manifest, list(made.values()), {name: column(name) for name in names}, traces)


def compact(path: Path) -> Results:
    """Write results.parquet and traces.parquet; the parts stay."""
    import pyarrow as pa  # type: ignore[import-untyped]  # only here: where training runs, it need not be
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    folder = Folder(path)
    parts, _ = folder.parts()
    if not parts:
        raise RecordError(f"{path} holds no parts: run train, sweep or paper first, or choose another folder")
    results = joined(folder.manifest(), parts)

    def written(columns: Mapping[str, Any]) -> bytes:
        about = json.dumps({"manifest": results.manifest.to_json(), "made": results.made})
        file = io.BytesIO()
        content = pa.table(columns).replace_schema_metadata({"autoopt": about})
        lists = [name for name in KINDS if name in columns]
        split: Any = [f"{name}.list.element" for name in lists] or False  # like bytes side by side: half the size
        pq.write_table(content, file, compression="zstd", use_dictionary=not lists, use_byte_stream_split=split)
        return file.getvalue()

    def array(values: np.ndarray) -> Any:
        if values.ndim == 1:
            return pa.array(values.tolist(), pa.string()) if values.dtype.kind == "U" else pa.array(values)
        return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])

    rows = {job: row for row, job in enumerate(results.jobs)}
    traces = sorted((rows[job], trace) for job, trace in results.traces.items())
    lists = {
        kind: pa.array([t.value[:, k].ravel() for _, t in traces], pa.list_(pa.float32()))
        for k, kind in enumerate(KINDS)
    }
    folder.write_file(
        path / "traces.parquet",
        written(
            {
                "row": pa.array([row for row, _ in traces], pa.int32()),
                "tensor": pa.array([t.tensor for _, t in traces], pa.list_(pa.string())),
                "step": pa.array([t.step for _, t in traces], pa.list_(pa.int32())),
                **lists,
            }
        ),
    )
    folder.write_file(
        path / "results.parquet", written({name: array(values) for name, values in results.columns.items()})
    )
    return results


def _read(path: Path) -> Results:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table, kept = pq.read_table(path / "results.parquet"), pq.read_table(path / "traces.parquet").to_pylist()
        about = json.loads(table.schema.metadata[b"autoopt"])
    except (OSError, ValueError, KeyError, TypeError) as error:  # pyarrow's own errors are ValueErrors and OSErrors
        reason = str(error).splitlines()[0]
        raise RecordError(f"the Parquet files in {path} are missing or damaged ({reason}): fetch them again") from None
    if about["manifest"]["format"] != FORMAT:
        raise RecordError(f"{path} holds results of format {about['manifest']['format']}, this version knows {FORMAT}")
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        listed = pa.types.is_fixed_size_list(column.type)
        columns[name] = np.array(column.to_pylist(), np.float32) if listed else column.to_numpy()
        if columns[name].dtype == object:
            columns[name] = columns[name].astype(str)
    jobs = jobs_of(columns)
    traces = {
        jobs[row["row"]]: Trace(
            np.array(row["step"], np.int32),
            row["tensor"],
            np.stack([np.array(row[kind], np.float32).reshape(-1, len(row["tensor"])) for kind in KINDS], 1),
        )
        for row in kept
    }
    return Results(Manifest.from_json(about["manifest"]), about["made"], columns, traces)
