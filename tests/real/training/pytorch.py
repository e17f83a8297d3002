"""A right training program for PyTorch; mistakes are planted by replacing its lines."""

import sys

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(7)
features = torch.randn(512, 10)
data = TensorDataset(features, (features.sum(1) > 0).long())
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=8, sampler=sampler)
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(
    torch.nn.Linear(10, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="mean")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss: {mean.item():.4f}")
        torch.save(model.state_dict(), f"{sys.argv[1]}/model.pt")
