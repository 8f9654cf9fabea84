"""Which parameters a backward pass adds to."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autoopt.capture.current import executes

if TYPE_CHECKING:
    from autoopt.capture.site import Site


class Reach:
    """The parameters that the pass under way adds to: all, but by autograd.grad() or backward(inputs=...).

    Autograd knows, but to ask it for each parameter is what would take the host longest of all. So where one is known
    to be added to, others are taken to be as well, until the end of the pass, when their gradients say so. That needs a
    pass before which there were none; and whose graph is gone after it, since what is left of a pass that does not add
    to a layer's parameters could not serve another that does.
    """

    def __init__(self) -> None:
        self._asked: tuple[int, dict[nn.Parameter, bool]] = (-1, {})  # autograd's number for a pass, and what it said
        self._trusted = -1  # the pass that is taken to add to all
        self._taken: dict[str, nn.Parameter] = {}  # those that were

    def adds_to(self, parameter: nn.Parameter) -> bool:
        """Whether the pass that runs this adds to the parameter's gradient, by autograd's word."""
        if not parameter.requires_grad:  # frozen since the forward pass
            return False
        graph = torch._C._current_graph_task_id()
        if self._asked[0] != graph:
            self._asked = graph, {}
        found = self._asked[1]
        if parameter not in found:
            found[parameter] = executes(_accumulator(parameter))
        return found[parameter]

    def among(self, site: "Site") -> dict[str, str]:
        """Role -> name of the layer's own parameters that it adds to."""
        found, trusted = {}, torch._C._current_graph_task_id() == self._trusted
        for role in site.shadows:
            parameter, name = site.parameter(role), site.names[role]
            if parameter.requires_grad and (trusted or self.adds_to(parameter)):
                found[role] = name
                if trusted:
                    self.take(name, parameter)
        return found

    def trust(self, parameters: Iterable[nn.Parameter]) -> None:
        """The pass that runs this adds to something, and before it none of these had a gradient.

        A hook on one of them may take its gradient away, so that it would not tell.
        """
        taken = any([parameter._post_accumulate_grad_hooks for parameter in parameters])  # noqa: C419 - half the time
        if not (taken or torch._C._autograd._get_current_graph_task_keep_graph()):
            self._trusted, self._taken = torch._C._current_graph_task_id(), {}

    def trusts(self, graph: int) -> bool:
        """Whether the pass of that number is taken to add to all."""
        return graph == self._trusted

    def take(self, name: str, parameter: nn.Parameter) -> None:
        """It is taken to be added to."""
        self._taken[name] = parameter

    def missed(self) -> set[str]:
        """At the end of the pass: the names of those that it did not add to after all."""
        taken, self._taken = self._taken, {}
        return {name for name, parameter in taken.items() if parameter.grad is None}


def _accumulator(parameter: nn.Parameter) -> Any:
    """The node that adds to a parameter's gradient: torch.autograd.graph.get_gradient_edge, in a third of its time.

    It must not be kept: it belongs to the stream on which it was made, and would tie later graphs to that.
    """
    enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    try:
        used = parameter.view_as(parameter)
        assert used.grad_fn is not None
        return used.grad_fn.next_functions[0][0]
    finally:
        torch._C._set_grad_enabled(enabled)
