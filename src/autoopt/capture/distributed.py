"""Samples that lie on several ranks, under DistributedDataParallel.

DDP averages the gradient over R ranks, so what a sample adds to `.grad` is a rank's own c_i over R. The spread needs
the samples of all ranks: Σ_i c_i² and N are summed over them, one small vector per step. That all ranks then choose the
same rate is what keeps their weights the same.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def active_group() -> "dist.ProcessGroup | None":
    """The ranks that share the forward pass that is under way, if DistributedDataParallel runs it."""
    model = DistributedDataParallel._get_active_ddp_module()
    return None if model is None else model.process_group


def total(numbers: Tensor, group: "dist.ProcessGroup") -> Tensor:
    """The sum over all ranks."""
    result = numbers.clone()
    dist.all_reduce(result, group=group)
    return result


def any_of(group: "dist.ProcessGroup", device: torch.device, answer: bool) -> bool:
    """Whether any of the ranks says so. Reads the device."""
    return bool(total(torch.tensor(float(answer), device=device), group))
