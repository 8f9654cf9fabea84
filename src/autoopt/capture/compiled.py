"""What a compiled backward pass, which runs none of this library's Python, cannot check for itself."""

import weakref
from collections.abc import Iterable

import torch

from autoopt.capture.current import NOT_SAMPLES
from autoopt.capture.site import Site


class Compiled:
    """Looks at the first compiled backward pass of each layer, when alone the device is asked."""

    def __init__(self) -> None:
        self.rows = 0  # samples of the last of these; the later passes are taken to have as many
        self._known: weakref.WeakSet[Site] = weakref.WeakSet()  # the layers

    def samples(self, sites: Iterable[Site]) -> int:
        """How many samples the compiled part of the pass that just ended had; 0 if there was none.

        Raises:
            RuntimeError: a layer was used more than once, or the layers do not agree on the number of samples.
        """
        seen = [site for site in sites if site.counts.grad is not None]
        if not seen:
            return 0
        if not self._known.issuperset(seen):
            self._look(seen)
            self._known.update(seen)
        return self.rows

    def _look(self, sites: list[Site]) -> None:
        found = [site.counts.grad.to(sites[0].counts.device) for site in sites if site.counts.grad is not None]
        table = dict(zip(sites, torch.stack(found).tolist(), strict=True))
        repeated = {site: uses for site, (_, uses) in table.items() if uses > 1}
        for site in repeated:
            site.repeated = True
        for site, uses in repeated.items():
            raise RuntimeError(
                f"layer '{site.name}' was used {uses:.0f} times in one backward pass of a compiled model. What a "
                "sample adds must be summed over the uses, for which the layer must run outside of the compiled graph: "
                "compile the model without fullgraph=True."
            )
        rows = {site.name: samples for site, (samples, _) in table.items()}
        few, many = min(rows, key=rows.__getitem__), max(rows, key=rows.__getitem__)
        if rows[few] != rows[many]:
            raise RuntimeError(
                f"layer '{many}' got {rows[many]:.0f} rows where '{few}' got {rows[few]:.0f} in the same backward "
                f"pass, {NOT_SAMPLES}"
            )
        self.rows = int(rows[many])
