"""Several processes: each rank sees its share of a batch; the rates come from all of them and are the same everywhere.

torchrun --nproc-per-node 2 examples/ddp_torchrun.py --steps 200
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoopt import AutoSGD


def main() -> None:
    parser = argparse.ArgumentParser(description="DistributedDataParallel on handwritten digits.")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    dist.init_process_group("gloo")  # "nccl" on GPUs
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same start everywhere
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    order = torch.randperm(len(y))
    train, test = order[:1440][rank::ranks], order[1440:]

    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))
    parallel = DistributedDataParallel(model)
    optimizer = AutoSGD(model)
    torch.manual_seed(1 + rank)  # batches of its own
    for _ in range(args.steps):
        batch = train[torch.randint(len(train), (32,))]
        optimizer.zero_grad()
        F.cross_entropy(parallel(x[batch]), y[batch]).backward()
        optimizer.step()

    with torch.no_grad(), optimizer.averaged():
        wrong = (model(x[test]).argmax(1) != y[test]).float().mean().item()
    chosen: list[object] = [None] * ranks
    dist.all_gather_object(chosen, optimizer.tuned())
    if rank == 0:
        same = all(other == chosen[0] for other in chosen)
        print(f"test error {wrong:.2%} with {ranks} ranks, which chose {'the same rates' if same else 'other rates'}")
    dist.barrier()  # gloo may abort a process that ends while its threads still hold a tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
