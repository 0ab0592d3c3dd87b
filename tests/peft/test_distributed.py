"""Two processes train the adapter that one process trains on the same batch: DDP, and FSDP with sharded adapters."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from helpers.adapters import make_model, train
from helpers.processes import free_port, run_code

WORKER = """
import os, sys
sys.path.insert(0, sys.argv[2])
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from helpers.adapters import make_model, train

torch.set_num_threads(1)
child = os.fork()
rank = "0" if child else "1"
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}  # as torchrun does
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[3]}
dist.init_process_group("gloo")
rank = dist.get_rank()
for kind in ("ddp", "fsdp"):
    model = make_model()
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        mesh = dist.init_device_mesh("cpu", (2,))
        for layer in model.base_model.model.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    train(wrapped, slice(rank, None, 2))
    state = None
    if kind == "fsdp":
        sharded = [p for p in model.parameters() if p.requires_grad]
        assert all(p.to_local().numel() < p.numel() for p in sharded), "adapters are not sharded"
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(f"{sys.argv[1]}/{kind}", state_dict=state)
    dist.barrier()
dist.destroy_process_group()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_two_processes_train_what_one_trains(tmp_path):
    single, start = make_model(), make_model()
    train(single, slice(None))
    single.save_pretrained(tmp_path / "single")
    start.save_pretrained(tmp_path / "start")
    done = run_code(WORKER, tmp_path, Path(__file__).parents[1], free_port())
    assert done.returncode == 0, done.stderr[-3000:]
    wanted, before, ddp, fsdp = (
        load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("single", "start", "ddp", "fsdp")
    )
    assert wanted.keys() == ddp.keys() == fsdp.keys()
    for name, tensor in wanted.items():
        assert torch.equal(tensor, before[name]) == ("feature_map" in name)  # all but projections moved
        assert torch.allclose(ddp[name], tensor, rtol=0, atol=1e-10), name
        assert torch.allclose(fsdp[name], tensor, rtol=0, atol=1e-10), name
