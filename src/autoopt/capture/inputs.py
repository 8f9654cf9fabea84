"""How large the data is that a layer takes.

Steps are relative to the size of the weights, and inputs of a tenth want weights ten times larger (docs/math.md, "Small
inputs"). So a pass notes the inputs of the layers that are given data, for the first step that follows: what autograd
does not lead back from, as the inputs of the model or what its frozen layers make of them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from autoopt.capture.aside import recording
from autoopt.moments import precision

LOOKS = 16  # passes that note, and steps that ask where ranks have to agree: the first batches need not be finite

RECURRENT = ("weight_ih_l0", "weight_ih_l0_reverse", "weight_ih")
WEIGHTS: dict[type[nn.Module], tuple[str, ...]] = {  # what multiplies the inputs
    nn.Linear: ("weight",),
    nn.modules.conv._ConvNd: ("weight",),
    nn.RNNBase: RECURRENT,
    nn.RNNCellBase: RECURRENT,
}


def weights_of(layer: nn.Module) -> tuple[str, ...]:
    """The roles of the parameters that multiply the inputs of a layer, if its output grows with these."""
    return next((roles for kind, roles in WEIGHTS.items() if isinstance(layer, kind)), ())


def size(given: Any) -> Tensor | None:
    """The mean square of what a layer is given; None if that is no data, or there is no looking at it.

    Of what is not zero: words and categories, which are mostly absent, are not small. Zero if all is.
    """
    x = given.data if isinstance(given, PackedSequence) else given
    if not isinstance(x, Tensor) or x.is_nested or not x.is_floating_point() or recording(x.device):
        return None
    if x.requires_grad and (not x.is_leaf or isinstance(x, nn.Parameter)):
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        norm: Tensor = torch.linalg.vector_norm(x, dtype=precision(x))
        return norm.square() / x.count_nonzero().clamp_min(1)
