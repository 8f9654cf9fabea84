"""How hypothesis draws a plan: layer after layer, each of which fits the shape that the one before it leaves."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from trust.fuzz import REFUSABLE, Plan
from trust.subjects import SUBJECTS

Layer = tuple[str, tuple[Any, ...], dict[str, Any]]
HABITS = ("zeros", "late zero_grad", "evaluate", "forward alone", "clip", "resume", "schedule", "one sample", "average")
IN_PLACE: Layer = ("ReLU", (True,), {})
ACTIVATIONS: tuple[Layer, ...] = (IN_PLACE, ("ReLU", (), {}), ("Tanh", (), {}), ("GELU", (), {}), ("ELU", (), {}))


@st.composite
def plans(draw: Any) -> Plan:
    start, tokens, layers, shape = draw(beginnings())
    for _ in range(draw(st.integers(0, 4))):
        layer, shape = draw(layers_for(shape))
        layers = (*layers, *layer)
    layers = allowed(layers)
    same = [number for number, (name, args, _) in enumerate(layers) if name == "Linear" and args[0] == args[1]]
    repeat = draw(st.sampled_from(same)) if same and draw(st.integers(0, 4)) == 0 else None
    meets = any(name.startswith("BatchNorm") for name, _, _ in layers)
    habits = draw(st.sets(st.sampled_from(HABITS), max_size=4))
    if meets:
        habits -= {"one sample"}  # torch itself refuses a batch of one there
        repeat = None  # its reference gives each call copies of its own
    flat = 1
    for size in shape:
        flat *= size
    return Plan(
        start=start, tokens=tokens, layers=layers, flat=flat, repeat=repeat,
        frozen=tuple(sorted(draw(st.sets(st.integers(0, 9), max_size=2)))),
        sizes=tuple(draw(st.lists(st.integers(2, 4), min_size=1, max_size=2))),
        loss=draw(st.sampled_from(["mean", "sum", "weighted"])),
        subject=draw(st.sampled_from(sorted(SUBJECTS))),
        elementwise=draw(st.booleans()),
        options=draw(options()),
        habits=tuple(sorted(habits)),
        seed=draw(st.integers(0, 3)),
    )  # fmt: skip


def allowed(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Without what torch or the reference cannot do."""
    if any(name in REFUSABLE for name, _, _ in layers):  # where samples meet, the reference knows torch's layers alone
        layers = tuple(layer for layer in layers if not layer[0].startswith("BatchNorm"))
    kept: list[Layer] = []
    for layer in layers:  # torch refuses to overwrite what an activation keeps
        if layer != IN_PLACE or not kept or kept[-1] not in ACTIVATIONS:
            kept.append(layer)
    return tuple(kept)


def options() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "granularity": st.sampled_from(["tensor", "layer", "group"]),
            "weight_decay": st.sampled_from([0.0, 0.01]),
            "lr": st.sampled_from([0.0, 0.1, 1.0]),
            "average": st.booleans(),
            "spread": st.sampled_from(["samples", "samples", "passes"]),
        },
    )


@st.composite
def beginnings(draw: Any) -> tuple[tuple[int, ...], int, tuple[Layer, ...], tuple[int, ...]]:
    """(shape of a sample, size of the vocabulary, first layers, the shape after them)."""
    kind = draw(st.sampled_from(["vector", "sequence", "image", "embedding", "bag"]))
    width, length = draw(st.integers(3, 5)), draw(st.integers(2, 4))
    if kind == "embedding":
        padding = draw(st.sampled_from([None, 0]))
        return (length,), 5, (("Embedding", (5, width), {"padding_idx": padding}),), (length, width)
    if kind == "bag":
        mode = draw(st.sampled_from(["sum", "mean"]))
        return (length,), 5, (("EmbeddingBag", (5, width), {"mode": mode}),), (width,)
    shape = {"vector": (width,), "sequence": (length, width), "image": (draw(st.integers(1, 4)), 4, 5)}[kind]
    return shape, 0, (), shape


@st.composite
def layers_for(draw: Any, shape: tuple[int, ...]) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """Layers that take the shape, and the shape after them."""
    if draw(st.integers(0, 4)) == 0:
        return (draw(st.sampled_from(ACTIVATIONS)),), shape
    if len(shape) == 3:
        return draw(image_layers(shape))
    kinds = ["Linear", "Linear", "LayerNorm", "RMSNorm", "PReLU", "Scaled"]
    kinds += ["BatchNorm1d"] if len(shape) == 1 else ["Conv1d", "Pooled", "Recurrent", "Attended"]
    kind = draw(st.sampled_from(kinds))
    width = shape[-1]
    if kind == "Linear":
        wide = draw(st.sampled_from([width, 3, 5]))
        return (("Linear", (width, wide), {"bias": draw(st.booleans())}),), (*shape[:-1], wide)
    if kind == "Conv1d":
        wide, kernel = draw(st.integers(2, 4)), draw(st.integers(1, shape[0]))
        convolution = ("Conv1d", (width, wide, kernel), {"bias": draw(st.booleans())})
        turn = ("Transposed", (), {})
        return (turn, convolution, turn), (shape[0] - kernel + 1, wide)
    if kind == "Scaled":
        return (("Scaled", (shape if draw(st.booleans()) else shape[-1:],), {}),), shape
    if kind == "Recurrent":
        cells, hidden = draw(st.sampled_from(["RNN", "LSTM", "GRU"])), draw(st.integers(2, 4))
        return (("Recurrent", (cells, width, hidden), {}),), (shape[0], hidden)
    if kind == "Attended":
        return (("Attended", (width, draw(st.sampled_from([h for h in (1, 2) if width % h == 0]))), {}),), shape
    if kind == "Pooled":
        return (("Pooled", (), {}),), (width,)
    arguments = {"PReLU": ()}.get(kind, (width,))
    return ((kind, arguments, {}),), shape


@st.composite
def image_layers(draw: Any, shape: tuple[int, ...]) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    channels, *space = shape
    kinds = ["Conv2d", "GroupNorm", "BatchNorm2d", "InstanceNorm2d", "PReLU", "ConvTranspose2d"]
    kind = draw(st.sampled_from(kinds))
    if kind in ("Conv2d", "ConvTranspose2d"):
        return draw(convolutions(kind, channels, tuple(space)))
    if kind == "GroupNorm":
        groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
        return (("GroupNorm", (groups, channels), {}),), shape
    options = {"affine": True} if kind == "InstanceNorm2d" else {}
    return ((kind, (channels,), options),), shape


@st.composite
def convolutions(
    draw: Any, kind: str, channels: int, space: tuple[int, ...]
) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
    wide = groups * draw(st.integers(1, 2))
    kernel, stride = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    chosen: dict[str, Any] = {"stride": stride, "groups": groups, "bias": draw(st.booleans())}
    if kind == "Conv2d":
        padding = draw(st.integers(0, 1))
        chosen |= {"padding": padding, "padding_mode": draw(st.sampled_from(["zeros", "reflect", "circular"]))}
        after = tuple((size + 2 * padding - kernel) // stride + 1 for size in space)
    else:
        after = tuple((size - 1) * stride + kernel for size in space)
    if min(after) < 2 or max(after) > 9:  # too small to pad and to normalise, or too large to be quick
        return (("Tanh", (), {}),), (channels, *space)
    return ((kind, (channels, wide, kernel), chosen),), (wide, *after)
