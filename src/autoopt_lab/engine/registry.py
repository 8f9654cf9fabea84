"""All optimizers by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autoopt_lab.engine.auto import Paper, PaperAdaGrad, PaperAdam
from autoopt_lab.engine.layout import Layout
from autoopt_lab.engine.robust import Robust
from autoopt_lab.engine.rules import AdaGradMetric, AdamMetric, Identity, Metric, Plain, PlainWithMomentum, Rule

RULES: dict[str, tuple[type[Rule], type[Metric]]] = {
    "sgd": (Plain, Identity),
    "adam": (PlainWithMomentum, AdamMetric),
    "adagrad": (Plain, AdaGradMetric),
    "auto-sgd": (Robust, Identity),  # the library's default
    "auto-adam": (Robust, AdamMetric),
    "auto-adagrad": (Robust, AdaGradMetric),
    "paper-sgd": (Paper, Identity),  # rule="paper"
    "paper-adam": (PaperAdam, AdamMetric),
    "paper-adagrad": (PaperAdaGrad, AdaGradMetric),
}


def make_rule(name: str, layout: Layout, batch: int, runs: list[Mapping[str, float]], like: Tensor) -> Rule:
    """The rule of a chunk; `runs` holds each run's options, `like` gives their device and dtype."""
    if name not in RULES:
        raise ValueError(f"there is no optimizer {name!r}: choose one of {', '.join(RULES)}")
    rule, metric = RULES[name]
    defaults = {**metric.options, **rule.options}
    unknown = sorted({option for run in runs for option in run} - set(defaults))
    if unknown:
        raise ValueError(f"{name} has no option {unknown[0]!r}: it knows {', '.join(defaults)}")
    option = {key: like.new_tensor([[run.get(key, value)] for run in runs]) for key, value in defaults.items()}
    return rule(metric(), layout, batch, option)
