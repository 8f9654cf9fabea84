"""Which parameters lie in which bucket, and which saved state is whose."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import nn

from autoopt.optim.bucket import AVERAGE, HELD, Bucket


def arrange(
    group: Mapping[str, Any],
    statistics: Mapping[str, float | Sequence[float]],
    buffers: Sequence[str],
    state: Mapping[Any, dict[str, Any]],
) -> list[Bucket]:
    """The buckets of a group: one for each device and dtype among its parameters that train."""
    places: dict[Any, list[tuple[str, nn.Parameter, Any]]] = {}
    for name, parameter in zip(group["param_names"], group["params"], strict=True):
        if parameter.requires_grad:
            unit = {"tensor": name, "layer": name.rpartition(".")[0], "group": None}[group["granularity"]]
            places.setdefault((parameter.device, parameter.dtype), []).append((name, parameter, unit))
    return [
        Bucket(members, statistics, buffers, [state[parameter] for _, parameter, _ in members])
        for members in places.values()
    ]


def unique(name: str, taken: Container[str]) -> str:
    """The name, with a number behind it if it is taken."""
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    return found


def fit(made: Sequence[Sequence[Bucket]], groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the buckets still hold all that trains, where it is now."""
    placed = {id(p) for buckets in made for bucket in buckets for p in bucket.params}  # a tensor's hash is slower
    trained = {id(p) for group in groups for p in group["params"] if p.grad is not None}
    return trained <= placed and all(
        bucket.fits()
        and (AVERAGE in bucket.buffers) == group["average"]
        and (HELD in bucket.statistics or group["measure_every"] == 1)
        for group, buckets in zip(groups, made, strict=True)
        for bucket in buckets
    )


def in_order(state_dict: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A saved state with its parameters in the order of the `own` groups' names, where the names are the same.

    An option that the saved groups lack, as those of an earlier version do, is the own group's.
    """
    groups = [dict(group) for group in state_dict["param_groups"]]
    foreign = next((group for group in groups if "maximize" in group), None)  # as all of torch's, and none of ours
    if foreign is not None:
        options = ", ".join(sorted(foreign.keys() - {"params", "param_names"}))
        raise ValueError(f"this state was saved by another optimizer, with the options {options}: start without it.")
    for group, mine in zip(groups, own, strict=False):
        names = mine["param_names"]
        saved = group.get("param_names", names)
        if sorted(saved) == sorted(names):
            group["params"] = [group["params"][saved.index(name)] for name in names]
        group["param_names"] = names  # the model's now, whatever wrapper it had when it was saved
        if all(name.isdigit() for name in names) and len(saved) == len(names):
            group["param_names"] = saved  # numbers stood in for names that nobody gave
        for option in mine.keys() - group.keys():
            group[option] = mine[option]
    return {**state_dict, "param_groups": groups}
