"""A few steps with FSDP2 over gloo; the first argument is where rank 0 writes what came out. Started under torchrun."""

import sys

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.integration.fsdp_steps import build, train


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    recipe, model, data, collate = build()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    losses = train(recipe, model, data, collate, rank=rank, size=size)
    weights = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    if rank == 0:
        torch.save({"losses": losses, "weights": weights, "local": local}, sys.argv[1])
    distributed.destroy_process_group()


main()
