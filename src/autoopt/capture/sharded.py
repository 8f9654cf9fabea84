"""Parameters whose rows lie on several ranks, under torch.distributed.fsdp.fully_shard (FSDP2).

Between the passes a parameter is a DTensor, and each rank holds some of its rows. While a module runs, a plain
parameter with all rows is in its place: from that one come the statistics of the rank's own samples, which are then
summed over the ranks as the gradient is. Each rank steps its own rows; what is summed over rows is summed over ranks,
so that all choose the same rate.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from autoopt.capture.ledger import Ledger


LARGEST = 2**26  # elements in one collective, unless one tensor has more: so much memory is needed on the side


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor; by its name, since the import of the class takes longer than that of all the rest."""
    return type(tensor).__name__ == "DTensor"


def local(tensor: Any) -> Tensor:
    """The rows that lie on this rank, maybe none."""
    rows: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return rows


def group_of(parameter: Any) -> "dist.ProcessGroup":
    """The ranks that hold the rows of a sharded parameter."""
    group: dist.ProcessGroup = parameter.device_mesh.get_group()
    return group


def whole(rows: Tensor, parameter: Any) -> Tensor:
    """The tensor that is laid out as a parameter is, and has these rows here; the memory is shared."""
    if not is_sharded(parameter):
        return rows
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def share(value: Tensor, parameter: Any) -> Tensor:
    """What of a tensor like a parameter, sharded as that one is or not at all, belongs on this rank."""
    if is_sharded(value) or not is_sharded(parameter):
        return local(value)
    from torch.distributed.tensor import distribute_tensor

    return local(distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None))


def scattered(tensors: Sequence[Tensor], parameters: Sequence[Any]) -> list[Tensor]:
    """The sum over the ranks of tensors with all rows, of which each rank is given its own: few collectives."""
    if len(tensors) > 1 and sum(tensor.numel() for tensor in tensors) > LARGEST:
        half = len(tensors) // 2
        return scattered(tensors[:half], parameters[:half]) + scattered(tensors[half:], parameters[half:])
    group = group_of(parameters[0])
    ranks, axes = group.size(), [parameter.placements[0].dim for parameter in parameters]
    blocks = []
    for tensor, axis in zip(tensors, axes, strict=True):
        rows = tensor.movedim(axis, 0)
        lacking = -len(rows) % ranks  # rows that would make the parts even
        flat = rows.reshape(-1)
        flat = F.pad(flat, (0, lacking * rows[0].numel())) if lacking else flat
        blocks.append(flat.view(ranks, -1))
    joined = torch.cat(blocks, 1)
    own = joined.new_empty(joined.shape[1])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.13
    scatter(own, joined.view(-1), group=group)
    parts = own.split([block.shape[1] for block in blocks])
    return [
        part.view(-1, *tensor.movedim(axis, 0).shape[1:])[: local(parameter).shape[axis]].movedim(0, axis)
        for part, tensor, parameter, axis in zip(parts, tensors, parameters, axes, strict=True)
    ]


def modules_of(model: nn.Module) -> list[Any]:
    """Those that fully_shard was applied to."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Have the sharded parameters in their places: those of the root stay gathered after a pass without a backward."""
    for module in modules_of(model):
        module.reshard()


def follow(model: nn.Module, modules: Sequence[Any], ledger: "Ledger") -> list[Any]:
    """Tell the ledger which plain parameters stand for the sharded ones, when these are first gathered."""
    held = [(layer, key, p) for layer in model.modules() for key, p in layer._parameters.items()]
    ahead = {(layer, key): ledger.names[p] for layer, key, p in held if p in ledger.names}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gathered(*_: Any) -> None:
        for (layer, key), name in list(ahead.items()):
            parameter = layer._parameters[key]
            if parameter is not None and not is_sharded(parameter):
                ledger.gather(name, parameter)
                del ahead[layer, key]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def left(module: nn.Module, args: Any, output: Any) -> Any:
        """What samples met parameters in may come out as a view, on which FSDP's hook is lost when it is changed."""
        return tree_map_only(Tensor, lambda t: t.clone() if _is_view(t) else t, output)

    return [module.register_forward_pre_hook(gathered) for module in modules] + [
        module.register_forward_hook(left, prepend=True) for module in modules
    ]


def _is_view(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # a Watch would take the base for a result
        return tensor.requires_grad and tensor._base is not None


def refuse(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise for trainable parameters that are sharded in another way than by fully_shard over one axis of ranks."""
    for path, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                f"module '{path}' is wrapped in FullyShardedDataParallel, which AutoOpt does not train: use "
                "fully_shard of torch.distributed.fsdp."
            )
    trained: dict[str, Any] = {name: p for name, p in parameters.items() if p.requires_grad}
    sharded = [p for p in trained.values() if is_sharded(p)]
    if not sharded:
        return
    by_fsdp, mesh = bool(modules_of(model)), sharded[0].device_mesh
    for name, parameter in trained.items():
        if not is_sharded(parameter):
            raise ValueError(
                f"parameter '{name}' is not sharded and others of the model are: apply fully_shard to the model too, "
                "not to its blocks alone. If it was, and the model has run since, call model.reshard() first."
            )
        if not by_fsdp or parameter.device_mesh.ndim > 1:
            raise ValueError(
                f"parameter '{name}' is sharded over {parameter.device_mesh} as {parameter.placements} (tensor "
                "parallel, HSDP), which AutoOpt does not train yet: use fully_shard with a mesh of one dimension."
            )
        if parameter.device_mesh != mesh:
            raise ValueError(
                f"parameter '{name}' is sharded over {parameter.device_mesh} and others over {mesh}, which AutoOpt "
                "does not train: use one mesh for all."
            )
        if parameter.device.type != mesh.device_type:
            raise ValueError(
                f"parameter '{name}' lies on {parameter.device} and is used on {mesh.device_type} (CPUOffloadPolicy), "
                "which AutoOpt does not train yet: leave offload_policy out."
            )


def refuse_factor(modules: Sequence[Any]) -> None:
    """Raise where gradients are not averaged over the ranks, since nothing in them shows by what they were divided."""
    for module in modules:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        factors = [getattr(group, "gradient_divide_factor", None) for group in groups]
        if any(factor is not None for factor in factors):
            raise RuntimeError(
                f"set_gradient_divide_factor({next(filter(None, factors))}) was called on {type(module).__name__}, and "
                "AutoOpt counts on gradients that are averaged over the ranks: multiply the loss instead."
            )


def refuse_late(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise where fully_shard put other parameters in the place of those that an optimizer was made for."""
    without = [name for name, p in parameters.items() if p.grad is None and p.requires_grad]
    for name in without if without and modules_of(model) else ():
        if is_sharded(model.get_parameter(name)):
            raise RuntimeError(
                f"parameter '{name}' was sharded after the optimizer was made, which trains what was there before: "
                "call fully_shard first, then make the optimizer."
            )
