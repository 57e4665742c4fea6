"""The least that data-parallel training needs. Everything that is not plain PyTorch is marked.

    unisono run -n 2 examples/minimal.py
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
import unisono  # <- 1

group = unisono.init()  # <- 2: from the launcher; a world of one without any
torch.manual_seed(1 + group.rank())  # <- 3: each rank draws its own data

net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))  # any module will do
ddp = unisono.DistributedDataParallel(net)  # <- 4: all start as rank 0
optimizer = torch.optim.Adam(net.parameters(), 0.01)

for step in range(500):
    x = torch.rand(32, 1) * 6 - 3
    loss = F.mse_loss(ddp(x), torch.sin(x))  # <- 5: ddp(x), not net(x)
    optimizer.zero_grad()
    loss.backward()  # gradients are averaged over ranks while this runs
    optimizer.step()
    if step % 100 == 99 and group.rank() == 0:
        print(f"step {step + 1}  loss {loss.item():.5f}")

identical = ddp.replicas_identical()
if group.rank() == 0:
    print(f"replicas identical: {'yes' if identical else 'NO'}\n{ddp.digest()}")
